"""The miniature: a small GLM-5.3, its tasks, and how it is trained."""
