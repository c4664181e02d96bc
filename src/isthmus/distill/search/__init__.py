"""Searches for the best student within a budget."""
