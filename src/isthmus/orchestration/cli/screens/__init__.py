"""Terminal output of the verbs."""
