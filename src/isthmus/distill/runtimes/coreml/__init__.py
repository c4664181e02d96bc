"""Core ML, the runtime of Apple devices."""
