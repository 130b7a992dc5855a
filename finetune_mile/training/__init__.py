"""A run from its settings to its results: set-up, training, monitoring, finishing, and its folder."""
