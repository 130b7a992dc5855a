"""Data in."""
