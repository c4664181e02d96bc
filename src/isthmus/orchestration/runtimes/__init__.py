"""Runtimes that verify packages."""
