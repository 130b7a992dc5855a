"""Recipes: the schema, the layers of files and flags with who set what, and how they become one checked value."""
