"""The functions of the row-level compiler, a module per family."""
