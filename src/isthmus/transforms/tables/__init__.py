"""Tables of other systems, Delta, Iceberg and SQL: read in Arrow, written as Parquet for every engine."""
