"""Work on views that an engine does: compute their rows, join them to a spine, write them to Redis."""
