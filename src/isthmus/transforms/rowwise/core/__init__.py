"""What a function of the row-level compiler may use: expressions, types, values, the graph and the registry of rules."""
