"""`glm53 bench`: ours against SGLang's own class against the bound, on the GPU that is there."""
