"""Declarations, and their compilation to a contract."""
