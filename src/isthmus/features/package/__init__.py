"""The package of a model as its readers see it."""
