"""Text from a causal language model, token by token, for servers, verifiers and export."""
