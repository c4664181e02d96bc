"""Statistics of features, drift, and checks of expectations."""
