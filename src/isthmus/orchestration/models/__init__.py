"""The steps of a model: distill, search, export, deploy."""
