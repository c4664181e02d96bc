"""Metrics of a model, the interval over several seeds, and the slices where a student loses most."""
