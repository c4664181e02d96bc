"""The asynchronous online store."""
