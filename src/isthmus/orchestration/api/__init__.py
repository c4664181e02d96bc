"""The API of a project: started from its settings, and its keys."""
