"""Read an existing Feast repository: its registry, its sources, and the values that its stores serve."""
