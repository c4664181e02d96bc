"""The parts that all functions of the compiler use: expressions, types, casts, values, the graph, the rules."""
