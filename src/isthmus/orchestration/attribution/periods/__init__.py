"""What changed between two periods: the population, its features, the contract and the model."""
