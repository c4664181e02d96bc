"""What the values of the tables look like, against what models learned from."""
