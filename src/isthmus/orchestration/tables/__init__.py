"""Steps that write the offline tables and publish them to Redis."""
