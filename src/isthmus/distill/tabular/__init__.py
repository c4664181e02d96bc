"""The task of tables, whole."""
