"""The offline store: Delta tables, their commits, and the history and snapshots of a view."""
