"""Pre-training runs of seconds."""

import torch

METHODS = ("simclr", "mocov2", "byol", "swav")
SHORT = [
    "--data", "demo:200", "--arch", "resnet-demo", "--steps", "12", "--batch-size", "16",
    "--set", "checkpoint_every=5", "--set", "log_every=1", "--set", "neighbours.bank=60",
    "--set", "neighbours.queries=30", "--set", "mocov2.queue=40", "--set", "swav.queue=40",
]  # fmt: skip


def exported(folder):
    """The state dict in a run's checkpoint."""
    return torch.load(folder / "export/checkpoint.ckpt", weights_only=True)["state_dict"]
