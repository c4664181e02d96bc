"""What devices get: a page with a package, and snapshots of the stored features that it reads."""
