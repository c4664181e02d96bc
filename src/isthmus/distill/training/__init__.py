"""The training loop, its checkpoints, and its batches with teacher outputs."""
