"""The API: lookups, predictions and deployments. It stands on `isthmus.features` alone."""
