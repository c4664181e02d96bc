"""Values in columns and in one packed row, and the key that leads to it."""
