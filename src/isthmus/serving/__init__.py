"""The API server: lookups, predictions and deployments."""
