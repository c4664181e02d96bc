"""The basis of the row-level compiler: expressions, types, values, the graph, the registry of rules."""
