"""The point-in-time join of a spine with views."""
