"""Model packages, snapshots and verdicts: what writers and readers of a model share."""
