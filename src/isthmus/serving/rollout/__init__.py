"""Deployments, rollbacks and models on trial."""
