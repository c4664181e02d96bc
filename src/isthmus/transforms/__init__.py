"""Computation of features: decorators, engines, sources, request transforms. No other package imports pyspark."""
