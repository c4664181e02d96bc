"""`isthmus stream`: read events, and keep the tables and the online rows of views up to date with them."""
