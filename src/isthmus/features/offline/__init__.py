"""The offline store: Delta tables, their commits, and the history and the latest rows of a view."""
