"""What work takes on which device."""
