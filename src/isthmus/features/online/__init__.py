"""The online store: the latest row of each key in Redis, and one-round-trip lookups."""
