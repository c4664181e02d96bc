"""Features: their definition, and where their values are stored."""
