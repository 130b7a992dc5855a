"""docs/checkpoints.md, written by `finetune-mile weights docs`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from finetune_mile.checkpoints.cards import read_card
from finetune_mile.core.files import shipped
from finetune_mile.core.problems import Problem
from finetune_mile.verbs.weights import TOLERANCE, compare

_HEAD = """\
# Checkpoints

Written by `finetune-mile weights docs --parity FOLDER --rewritten FOLDER`; do not edit by hand.

`--init` takes a card's name, a file, a folder (TensorFlow checkpoint, SavedModel, one of our run
folders, a Hugging Face folder), `timm:NAME`, `hf:owner/name`, or `none`. The format is found by
content, never by a file's name, and the network is read from the shapes of the tensors. Every
tensor is accounted for: loaded, reset or dropped, by name, in `init.json` and in `finetune-mile
weights check FILE --names`. A name or a shape that does not fit stops the load.

A file of your own gets a card, with its hash, network and first features, in your configuration folder
(`FINETUNE_MILE_CONFIG`, else `~/.config/finetune_mile`); `--init mine` then finds it from any folder, and
refuses it if the file changed. `verify` fetches a card's file, loads it and records what it saw beside your cards:

```bash
finetune-mile weights add runs/pretrain-1/export/model.safetensors --name mine --citation "our lab, 2026"
finetune-mile weights verify mine
```

- **Several trunks in one file** (online and momentum, student and teacher): formats that we know
  say which one is meant. Otherwise the load stops and names them; pick one by its prefix,
  `--init 'FILE::PREFIX'`. SimCLR-v2's EMA copy is `--init simclrv2-sk1::ema_model`. After `::` the
  name of a format forces that format. A part that is picked by its prefix keeps the format of the
  complete file: its padding, its input and its stem.
- **Parts inside a backbone that we do not know**, such as attention modules, stop the load: without
  them the features would be wrong. Heads, queues and momentum copies beside it are dropped.
- **Heads** are always new in a run. A classifier in the file has seen labels (SimCLR-v2's
  `head_supervised` all of ImageNet's); it is used only when it is named, by `keep_head`. It was
  trained on the backbone's features, so `keep_head` does not go with `head_from: 1`, except for our
  own exports.
- **The classifier that a run trained**: `finetune_mile.load_classifier(RUN)` loads it, with its
  classes and `.predict("photo.jpg")`; `finetune_mile.load(RUN, num_classes=C)` does not, and warns.
  `finetune-mile weights convert RUN OUT` (also `--to timm`) keeps it; `--drop-head` leaves it out.
  The classifier of another file is left out unless `--keep-head NAME` asks for it.
- **Padding** has no tensors, so a wrong choice loads without a complaint and shifts every feature.
  It comes with the format: `torch` symmetric; `tf` SimCLR (SAME pooling); `same` haiku (SAME
  everywhere); `port` the PyTorch port of SimCLR-v2 as the published MILe code runs it.
- **A 3x3 stem** has padding 1 in most code and padding 2 in solo-learn. solo-learn's own files are
  recognised, except those from before April 2022 without a momentum copy. Where a file does not tell
  (such a file, an extracted backbone, your own module with `backbone` and `classifier`), the load
  stops and asks: `--arch resnet18-cifar` is padding 1, `--arch resnet18-cifar2` is padding 2. In
  Python it is `finetune_mile.load(FILE, arch=...)`; with `--model` and `--teacher`, append it to the
  file, `FILE::resnet18-cifar`.
- **Other things that no tensor shows** are part of the network's name, so that exports keep them:
  `resnet18-nopool` has no max-pooling after a 7x7 stem (lightning-bolts on STL-10), `-norelu` no ReLU
  after `bn1` (a Sequential of the children of lightly's ResNetGenerator),
  `timm:vit_small_patch16_224:heads=12` another number of attention heads than timm's (MoCo-v3). They
  are read from the file where it tells, and can be given with `--arch`.
- Infinite or undefined numbers in any tensor that is loaded, and negative variances, stop the load.
- Our own exports carry all this in the header of `model.safetensors`.
"""


_UPSTREAM = """\
## Measured: files that the upstream's own code wrote

Features of a fixed input against those of the upstream's own network. Largest difference over the
largest feature; the bound is 1e-4.
"""
_REWRITTEN = """\
## Measured: the same weights in formats whose own files were not at hand

Written by our tests (`tests/checkpoints/rewriting.py`) after the formats' sources, with the weights
of the files above and the features of their upstream networks; where only one size is given, with
torchvision's or timm's own network as the reference. This measures our adapter against our reading
of the format, not against a file of the upstream.
"""


def write_docs(out: Path, *, parity: Path | None, rewritten: Path | None) -> None:
    """Write docs/checkpoints.md from the cards, the adapters and the folders that are measured on the spot."""
    from finetune_mile.checkpoints.adapters import ADAPTERS

    formats = []
    for name, adapter in ADAPTERS.items():
        mean, std = adapter.preprocess.mean, adapter.preprocess.std
        wants = "[0, 1]" if std == (1.0, 1.0, 1.0) else f"mean {mean[0]}, ... deviation {std[0]}, ..."
        formats.append((f"`{name}`", adapter.method, adapter.padding, wants))
    cards = []
    for card in sorted(map(read_card, shipped("weights").glob("*.yaml")), key=lambda card: card.name):
        top1 = "" if card.linear_top1 is None else f"{card.linear_top1:g}"
        tuned = ", ".join(f"{value:g} ({float(part):.0%})" for part, value in card.finetune_top1.items())
        seen = "yes" if card.verified else "unverified"
        cards.append((f"`{card.name}`", card.method, card.arch or "", top1, tuned, card.licence, seen))
    parts = [
        _HEAD,
        "## Formats, in the order in which they are tried\n\n"
        + _markdown(("format", "made by", "padding", "input"), formats),
        *(f"{title}\n{_measured(folder)}" for title, folder in ((_UPSTREAM, parity), (_REWRITTEN, rewritten))
          if folder is not None),
        f"## Cards ({len(cards)})\n\n"
        "Accuracies as published. `unverified`: nobody here could fetch the published file.\n\n"
        + _markdown(("card", "method", "network", "linear top-1", "fine-tuned top-1", "licence", "loaded"), cards),
    ]  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(parts), encoding="utf-8")


def _markdown(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _measured(folder: Path) -> str:
    """The table of a folder's checkpoints and how far their features are from the expected ones."""
    from finetune_mile.checkpoints.loading import open_trunk

    rows: list[tuple[str, ...]] = []
    for path, expected in _checkpoints_in(folder):
        opened = open_trunk(str(path))
        figures = compare(opened, expected)
        sizes = ", ".join(f"{figure:.0e} at {size}" for size, figure in figures.items())
        verdict = "yes" if max(figures.values()) <= TOLERANCE else "NO"
        rows.append((path.parent.name, f"`{opened.report.format}`", opened.report.arch, sizes, verdict))
    if not rows:
        raise Problem(f"{folder}: no folder in it holds a checkpoint and an expected.npz")
    return _markdown(("checkpoint", "format", "network", "difference", "within"), rows)


def _checkpoints_in(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Each checkpoint beside an `expected.npz`, unpacked where it is packed (`.zst`)."""
    for expected in sorted(folder.glob("*/expected.npz")):
        with tempfile.TemporaryDirectory() as place:
            inside = Path(place) / expected.parent.name
            inside.mkdir()
            for file in expected.parent.iterdir():
                if file.suffix == ".zst":
                    _unpack(file, inside / file.stem)
                elif file.suffix not in (".npz", ".txt"):
                    shutil.copy(file, inside / file.name)
            names = sorted(path for path in inside.iterdir() if ".data-" not in path.name)
            if names:
                yield names[0], expected


def _unpack(packed: Path, plain: Path) -> None:
    try:
        import zstandard
    except ImportError as error:
        raise Problem("--parity: .zst files need the package zstandard (pip install zstandard)") from error
    with packed.open("rb") as source, plain.open("wb") as target:
        zstandard.ZstdDecompressor(max_window_size=2**27).copy_stream(source, target)
