"""One small file for each family of checkpoint formats."""
