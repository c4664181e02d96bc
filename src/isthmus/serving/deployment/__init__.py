"""What is deployed, on disk: the deployment, its history, the packages beside the server."""
