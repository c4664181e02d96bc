"""The verbs of the command line: each calls the function its Dagster asset calls."""
