"""Recorded answers: collected, and replayed from the history."""
