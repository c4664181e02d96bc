"""The API server of a project: start it, manage its keys, push rows to it, and collect pushed rows."""
