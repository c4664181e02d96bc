"""`isthmus apply`: contracts, what changes, and Feast's registry."""
