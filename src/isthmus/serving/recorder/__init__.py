"""The recorder of a server: what each answer rested on, in batches on disk."""
