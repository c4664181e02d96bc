"""What is declared of a language model."""
