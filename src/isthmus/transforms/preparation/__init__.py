"""What happens to the inputs of a model before its network."""
