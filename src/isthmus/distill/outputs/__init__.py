"""A teacher's outputs as data: computed once, stored in shards, read through memory maps."""
