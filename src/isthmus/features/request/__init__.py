"""A request transform at run time."""
