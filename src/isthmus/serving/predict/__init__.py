"""A model and its predictions."""
