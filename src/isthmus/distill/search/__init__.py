"""Search for the best student within a budget."""
