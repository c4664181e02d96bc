"""The task of causal language models: training data, models and training objective."""
