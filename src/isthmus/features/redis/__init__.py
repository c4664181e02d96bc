"""Connections to Redis: addresses, pipelines, error messages and the embedded server."""
