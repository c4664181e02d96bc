"""What a graph of rows does before its numeric core, as a list of steps that any language can follow."""
