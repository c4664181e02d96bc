"""Training that yields to servers on the same machine."""
