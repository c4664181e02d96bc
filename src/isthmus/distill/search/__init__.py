"""Students under a budget."""
