"""The API of a project: started from its settings, its keys, and what was pushed to it."""
