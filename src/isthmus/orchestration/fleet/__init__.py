"""Kubernetes manifests, Dockerfiles and an accelerate configuration for a project."""
