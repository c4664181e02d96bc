"""What a step is, and the outline of a project that Dagster builds the graph from."""
