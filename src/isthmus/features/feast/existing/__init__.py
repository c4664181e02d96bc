"""An existing Feast repository, opened to read: its registry, its sources, and what its stores serve."""
