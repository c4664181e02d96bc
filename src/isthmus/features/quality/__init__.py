"""What the values of a feature look like, how far they drifted, and whether they keep their promises."""
