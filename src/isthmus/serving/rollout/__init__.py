"""Changing what is deployed, and the candidate beside it."""
