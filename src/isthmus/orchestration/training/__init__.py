"""Training data for any spine."""
