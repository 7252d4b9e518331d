"""What a client sees of GLM-5.3's text: tool calls, reasoning and the thinking budget."""
