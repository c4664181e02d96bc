"""What a user declares, and how it becomes a contract."""
