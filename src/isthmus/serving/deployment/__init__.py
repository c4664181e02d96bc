"""The deployment on disk: its file, its history, and the cached packages."""
