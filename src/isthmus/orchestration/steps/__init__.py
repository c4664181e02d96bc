"""Steps of a project: their base classes, and the outline from which Dagster's graph is built."""
