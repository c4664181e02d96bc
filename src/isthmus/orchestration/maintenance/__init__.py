"""`isthmus maintain`: small files merged, old versions removed, caches trimmed; and the space that tables take."""
