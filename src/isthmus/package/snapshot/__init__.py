"""Snapshots for devices: the stored features of a service at a moment, as a signed file, and the way to a newer one."""
