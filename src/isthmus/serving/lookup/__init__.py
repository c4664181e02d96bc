"""A compiled lookup, its compact formats, and pushed rows."""
