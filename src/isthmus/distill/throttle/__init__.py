"""How a training gives way to serving on the same machine."""
