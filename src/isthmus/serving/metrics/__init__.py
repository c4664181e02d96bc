"""Metrics of the server."""
