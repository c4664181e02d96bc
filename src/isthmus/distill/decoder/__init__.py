"""Causal language models as ONNX graphs with a cache, and what their packages need."""
