"""Declarations of causal language models."""
