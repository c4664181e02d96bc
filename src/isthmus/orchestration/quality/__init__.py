"""Statistics of the tables, their expectations, and drift from the data that models learned from."""
