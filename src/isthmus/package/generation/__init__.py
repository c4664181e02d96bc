"""Text from a causal language model, token by token: what a server, a verifier and an export share."""
