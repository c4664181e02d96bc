"""Snapshots for devices: signed files with the stored features of a service, and deltas between them."""
