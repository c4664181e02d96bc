"""Steps of a model: distill, search, export, deploy."""
