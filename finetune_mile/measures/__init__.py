"""Numbers out."""
