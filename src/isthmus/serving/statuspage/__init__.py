"""What a server says about itself: as JSON, and as a page."""
