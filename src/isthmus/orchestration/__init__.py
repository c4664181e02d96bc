"""The user's project, its steps, their Dagster assets and the command line."""
