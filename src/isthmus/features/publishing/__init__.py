"""From the offline table to Redis: only what changed."""
