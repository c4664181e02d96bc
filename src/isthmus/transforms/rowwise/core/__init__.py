"""What a function of the row-level compiler builds on: expressions, types, values, the graph, the registry of rules."""
