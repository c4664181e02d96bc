"""The task of texts: a large model teaches a small one with a tokenizer of its own."""
