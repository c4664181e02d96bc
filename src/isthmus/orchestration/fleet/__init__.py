"""What runs a project on two fleets: Kubernetes manifests, an accelerate configuration and Dockerfiles."""
