"""From a student to a package."""
