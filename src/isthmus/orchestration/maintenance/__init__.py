"""`isthmus maintain`: merge small files, remove old versions, trim caches, and measure the size of tables."""
