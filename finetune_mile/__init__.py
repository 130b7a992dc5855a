"""Fine-tune self-supervised image models with MILe, multi-label iterated learning."""

__version__ = "0.1.0"
