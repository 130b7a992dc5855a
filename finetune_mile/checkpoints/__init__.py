"""Weights in and out: cards, readers, detection, adapters, loading, exports."""
