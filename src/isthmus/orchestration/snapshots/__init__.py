"""Device snapshots of stored features, and static pages that run a package in the browser."""
