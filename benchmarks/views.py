"""What each augmentation does to a photo, and what it costs: docs/augmentation.jpg and a table.

python benchmarks/views.py               # two photos that come with scikit-learn; or name two of your own
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from finetune_mile.core.types import Preprocess
from finetune_mile.images.order import uniforms
from finetune_mile.images.pipeline import DRAWS, Augmentation, centre_view, decode, random_view
from finetune_mile.learning.mixing import draw_mix

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 8
PLAIN = Augmentation(crop="random-resized", scale=(0.2, 1.0), shift=0, flip=True)
STILL = Augmentation(crop="none", scale=(1.0, 1.0), shift=0, flip=False)  # so that the rest is seen alone
KINDS = {
    "crop, flip": PLAIN,
    "jitter": replace(STILL, jitter=(0.4, 0.4, 0.4, 0.1)),
    "no hue": replace(STILL, jitter=(0.4, 0.4, 0.4, 0.0)),
    "trivial": replace(STILL, policy="trivial"),
    "rand": replace(STILL, policy="rand"),
    "erase": replace(STILL, erase=1.0),
}
MIXES = {"mixup 1": {"mixup": 1.0, "cutmix": 0.0}, "cutmix 1": {"mixup": 0.0, "cutmix": 1.0}}


def rows(photos: list[Tensor], preprocess: Preprocess) -> dict[str, list[Tensor]]:
    """Views (3, size, size) of each kind, one an epoch, of the photos in turn; mixed ones by step."""
    shown = {
        kind: [
            random_view(photos[epoch % 2], preprocess, augmentation, _draws(epoch, epoch % 2))
            for epoch in range(COLUMNS)
        ]
        for kind, augmentation in KINDS.items()
        if kind != "no hue"
    }
    pair = torch.stack([centre_view(photo, preprocess) for photo in photos]).float()
    for kind, settings in MIXES.items():
        mixes = [draw_mix(0, step, preprocess.size, preprocess.size, **settings) for step in range(COLUMNS)]
        shown[kind] = [mix.images(pair)[step % 2].round().to(torch.uint8) for step, mix in enumerate(mixes)]
    return shown


def _draws(epoch: int, sample: int) -> list[float]:
    draws: list[float] = uniforms(0, epoch, np.array([sample]), DRAWS)[0].tolist()
    return draws


def picture(shown: dict[str, list[Tensor]], path: Path) -> None:
    figure = Figure(figsize=(COLUMNS * 1.2 + 0.8, len(shown) * 1.2), layout="constrained")
    axes = figure.subplots(len(shown), COLUMNS)
    for line, (kind, views) in zip(axes, shown.items(), strict=True):
        for axis, view in zip(line, views, strict=True):
            axis.imshow(view.permute(1, 2, 0).numpy())
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(kind, fontsize=11)
    figure.savefig(path, dpi=90, pil_kwargs={"quality": 85})


def milliseconds(photo: Tensor, augmentation: Augmentation) -> float:
    """The median time of a view at 224 pixels, of 100, in one thread."""
    times = []
    for epoch in range(100):
        draws, began = _draws(epoch, 0), time.perf_counter()
        random_view(photo, Preprocess(), augmentation, draws)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path, nargs="*", help="two image files")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/augmentation.jpg")
    options = parser.parse_args()
    files = options.photos
    if not files:
        import sklearn.datasets

        files = [Path(sklearn.datasets.__file__).parent / "images" / name for name in ("china.jpg", "flower.jpg")]
    if len(files) != 2:
        parser.error("name two image files, or none")
    torch.set_num_threads(1)
    photos = [decode(file.read_bytes()) for file in files]
    picture(rows(photos, Preprocess(size=128, crop=1.0)), options.out)
    print(f"median ms per {photos[0].shape[-1]} x {photos[0].shape[-2]} photo to 224 pixels, decoded, one thread")
    for kind, augmentation in KINDS.items():
        print(f"{kind:12} {milliseconds(photos[0], augmentation):.1f}")


if __name__ == "__main__":
    main()
