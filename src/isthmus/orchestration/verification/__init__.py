"""One verdict over stores, API and model."""
