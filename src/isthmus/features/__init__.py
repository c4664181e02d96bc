"""What a feature is and where it lives."""
