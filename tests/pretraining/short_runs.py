"""Pre-training runs of seconds."""

import torch

METHODS = ("simclr", "mocov2", "byol", "swav")
SHORT = [
    "--data", "demo:100", "--arch", "resnet-mini", "--steps", "8", "--batch-size", "8",
    "--set", "checkpoint_every=3", "--set", "log_every=1", "--set", "neighbours.bank=40",
    "--set", "neighbours.queries=20", "--set", "mocov2.queue=20", "--set", "swav.queue=20",
]  # fmt: skip


def exported(folder):
    """The state dict in a run's checkpoint."""
    return torch.load(folder / "export/checkpoint.ckpt", weights_only=True)["state_dict"]
