"""Attribute the gap between ideal and actual scores to the stages in between."""
