"""Core ML, which phones of Apple have."""
