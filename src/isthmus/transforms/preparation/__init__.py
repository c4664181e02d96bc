"""The steps between a model's inputs and its network: declared, fitted by an engine, compiled to a graph."""
