"""Runtimes to verify a package with."""
