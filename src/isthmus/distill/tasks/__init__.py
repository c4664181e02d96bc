"""What a kind of model must answer."""
