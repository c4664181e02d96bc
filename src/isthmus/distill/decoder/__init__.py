"""Causal language models as graphs with a cache, and the packages of them."""
