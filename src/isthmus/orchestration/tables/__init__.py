"""The step `build`: runs the transforms and writes the offline tables."""
