"""Make simclr-demo.safetensors: a small ResNet pre-trained by SimCLR on the demo's training grids, without labels.

    python weights/make_simclr_demo.py            # two and a half minutes on two quiet cores

Everything is drawn from one seed, on two threads, so that the same machine writes the same bytes again.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from pathlib import Path

import numpy as np
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from finetune_mile.checkpoints.cards import find_card
from finetune_mile.images.order import permutation, uniforms
from finetune_mile.images.sources.grids import load
from finetune_mile.networks.heads import build

SEED, STEPS, BATCH, RATE, TEMPERATURE = 0, 400, 256, 2e-3, 0.2


def view(images: Tensor, draws: np.ndarray) -> Tensor:
    """A random affine map (turn, zoom, shift), contrast and noise of images (B, 3, H, W) in [0, 1]; draws (B, 6)."""
    d = torch.from_numpy(draws).float() * 2 - 1  # in [-1, 1)
    angle, zoom = 0.25 * d[:, 0], 1 + 0.15 * d[:, 1]
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    shift = 0.15 * d[:, 2:4]
    maps = torch.stack([cos, -sin, shift[:, 0], sin, cos, shift[:, 1]], 1).view(-1, 2, 3)
    grid = torch.nn.functional.affine_grid(maps, list(images.shape), align_corners=False)
    warped = torch.nn.functional.grid_sample(images, grid, align_corners=False)
    contrast = (1 + 0.5 * d[:, 4]).view(-1, 1, 1, 1)
    noise = torch.randn(len(images), 1, *images.shape[2:]) * (0.1 * (d[:, 5] + 1)).view(-1, 1, 1, 1)
    return (warped * contrast + noise).clamp(0, 1)


def main() -> None:
    """Pre-train and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("simclr-demo.safetensors"))
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    card, train = find_card("simclr-demo"), load("").train
    assert card.arch is not None
    network = build(card.arch)
    head = SimCLRProjectionHead(network.num_features, 128, 64)
    criterion = NTXentLoss(temperature=TEMPERATURE)
    optimizer = torch.optim.AdamW([*network.parameters(), *head.parameters()], lr=RATE, weight_decay=1e-4)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (card.preprocess.mean, card.preprocess.std))
    per_epoch = len(train) // BATCH
    for step in track(range(options.steps), description="SimCLR"):
        epoch, at = divmod(step, per_epoch)
        picked = permutation(SEED, epoch, len(train))[at * BATCH : (at + 1) * BATCH]
        images = torch.stack([train.read(int(i)) for i in picked]).float() / 255
        views = [view(images, uniforms(SEED + 1 + i, epoch, picked, 6)) for i in range(2)]
        features = [head(network((v - mean) / std)) for v in views]
        loss = criterion(*features)
        for group in optimizer.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {name: t.contiguous() for name, t in network.state_dict().items()}
    save_file(tensors, options.out, metadata={"format": "pt"})
    print(f"loss {float(loss):.4f}  sha256 {hashlib.sha256(options.out.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
