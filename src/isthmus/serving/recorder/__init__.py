"""The recorder of a server: the inputs of each answer, written to disk in batches."""
