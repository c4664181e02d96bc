"""The steps of a graph of rows before its numeric core, in a format that any language can execute."""
