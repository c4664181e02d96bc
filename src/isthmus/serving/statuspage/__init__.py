"""The status of the server, as JSON and as a page."""
