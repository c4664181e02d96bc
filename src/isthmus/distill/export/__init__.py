"""Export a student as a package."""
