"""Recorded predictions as the rows of an attribution, and the explanation of a single prediction."""
