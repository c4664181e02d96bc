"""What the server counts."""
