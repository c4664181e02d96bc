"""The contract of a project, its hash, and the difference between two contracts."""
