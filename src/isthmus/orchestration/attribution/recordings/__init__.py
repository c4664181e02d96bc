"""Recorded predictions: as the rows of an attribution, and a single one explained."""
