"""`isthmus apply` and `isthmus contract`: contracts, their differences, and Feast's registry."""
