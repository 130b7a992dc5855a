"""Self-supervised pre-training with lightly."""
