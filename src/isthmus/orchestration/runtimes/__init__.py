"""Runtimes that only a verifier needs."""
