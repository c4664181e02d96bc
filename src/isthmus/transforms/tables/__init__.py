"""Readers of Delta tables, Iceberg tables and SQL queries. Rows are read as Arrow and copied to Parquet for engines."""
