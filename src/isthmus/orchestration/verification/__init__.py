"""Verify that stores, API, package and devices agree."""
