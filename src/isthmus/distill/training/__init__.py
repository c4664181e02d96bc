"""The training loop, its checkpoints and what it learns from."""
