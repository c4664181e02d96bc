"""The task of causal language models."""
