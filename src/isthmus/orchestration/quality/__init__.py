"""What the values of the tables look like, and how far they are from those that models learned from."""
