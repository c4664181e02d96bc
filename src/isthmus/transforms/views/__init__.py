"""A view by the engine: computed, joined, written online."""
