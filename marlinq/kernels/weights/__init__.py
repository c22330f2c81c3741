"""What the host knows of a weight format."""
