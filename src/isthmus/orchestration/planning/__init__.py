"""Time and cost of training and serving on each device."""
