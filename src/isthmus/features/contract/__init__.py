"""What a reader of features must know, its hash, and the difference between two contracts."""
