"""What a model is measured by, with the interval of several seeds and the slices where it loses most."""
