"""Compare the rows of a source with the rows that an online store serves, and name the cause of each difference."""
