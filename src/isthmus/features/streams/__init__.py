"""Events of streams: their readers, their formats, and the table that keeps them."""
