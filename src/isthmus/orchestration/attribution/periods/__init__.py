"""Attribute a change between two periods to population, features, contract and model."""
