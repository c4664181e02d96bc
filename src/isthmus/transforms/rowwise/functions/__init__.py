"""The Spark functions that the compiler knows, one module per family. Importing a module registers its functions."""
