"""A compiled lookup, its compact forms, and pushed rows."""
