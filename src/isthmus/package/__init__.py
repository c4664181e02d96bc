"""Model packages, snapshots and verdicts, shared by everything that writes or reads a model."""
