"""Request transforms at run time."""
