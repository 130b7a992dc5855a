"""`python -m tests.weights_page` writes docs/checkpoints.md from the cards, the adapters and what is measured."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from finetune_mile.checkpoints.cards import read_card
from finetune_mile.checkpoints.inspecting import TOLERANCE, compare
from finetune_mile.core.files import shipped
from finetune_mile.core.problems import Problem, tell

_STRONG = """\
## Good weights in one word

```bash
finetune-mile run --init dinov2-s --data folder:photos
finetune-mile weights ls --commercial --max-mb 200
```

A card's name downloads its file once. The strongest ones, with accuracies as their authors publish them for ImageNet;
MAE's are made for fine-tuning:

"""
_FETCHING = """\
- **Where from**: the authors' address. If it cannot be reached: timm's copy on the Hugging Face hub, if there is one.
- **A broken download** continues where it stopped.
- **Hashes**: a file's hash is kept beside it at its first use, and compared from then on. DINOv2's cards have a hash,
  the one that several public repositories record for the file.
- **Input**: 224 pixels, also for DINOv2, whose positions are for 518; they are resized as its authors do
  ([vits.md](vits.md)).
- **Which one**: `weights ls` lists all cards, the best first, and takes `--licence`, `--commercial`, `--max-mb` and
  `--json`. `timm:NAME`, for example `timm:resnet50.a1_in1k`, takes timm's weights; most were trained with labels.
"""
_HEAD = """\
# Checkpoints

Written by `python -m tests.weights_page --parity FOLDER --rewritten FOLDER` (without a folder, its table is
kept) and `python -m tests.checkpoints.upstream`; do not edit by hand.

<STRONG>
## On top of solo-learn weights

solo-learn's `main_pretrain.py` writes `trained_models/METHOD/ID/NAME-ID-ep=N.ckpt`. Give that file; nothing of
solo-learn has to be installed:

```bash
finetune-mile weights check 'trained_models/byol/1a2b/byol-1a2b-ep=399.ckpt'
finetune-mile run --init 'trained_models/byol/1a2b/byol-1a2b-ep=399.ckpt' --data folder:photos --fraction 0.1
finetune-mile run --init 'trained_models/byol/1a2b/byol-1a2b-ep=399.ckpt' --recipe ssl/byol --fraction 0.01
```

- **Loaded**: `backbone` (`encoder` in 2021). `--init 'FILE::momentum_backbone'` takes the moving average instead.
- **Dropped**: projector, predictor, queue, prototypes. `classifier` is the online probe: it has seen all labels, so it
  is not used unless `--keep-head classifier` asks for it.
- **CIFAR**: the stem is a 3x3 convolution with padding 2. A complete file shows that it is solo-learn's.
  For a backbone that was extracted as in solo-learn's README, say `--format solo-learn`.
- **Input**: ImageNet's mean and deviation. solo-learn trains CIFAR with CIFAR's own, which no file shows: see
  the cards, and say `--set 'mean=[0.4914,0.4822,0.4465]' --set 'std=[0.247,0.243,0.261]'`.
- **Recipe**: on your own images `finetune.yaml` is taken. On ImageNet name the one of the method, as above:
  `ssl/byol`, `ssl/simclr`, `ssl/mocov2` (also for MoCo-v2+), `ssl/swav`; `ssl/any` for the others.
- **Where to get files**: solo-learn took its files off the net in April 2026. The cards `solo-*` keep its list of
  ResNets: method, data, network, epochs and published accuracy. If you have one of the files, `--init FILE` loads it.

## On top of VISSL weights

Each ResNet of VISSL's MODEL_ZOO.md has a card, which fetches the file. DeepCluster-v2 and the widest
SwAV have the names of SwAV's own list, `deepclusterv2*` and `swav-w5`. A file of your own works as
well:

```bash
finetune-mile run --init vissl-swav-800ep --fraction 0.01
finetune-mile run --init checkpoints/model_final_checkpoint_phase199.torch --data folder:photos
```

- **Loaded**: the trunk in `classy_state_dict.base_model.model.trunk`, or names below `_feature_blocks` in the zoo's
  converted files. The heads, the optimiser and the loss (with MoCo's key encoder) are dropped.
- **Input**: RGB, ImageNet's mean and deviation; SimCLR-v2's converted trunk expects [0, 1], as on its card.
  No VISSL file shows whether it was trained with BGR or Lab images: the load report says that RGB is assumed.
- **Recipe**: a card of SimCLR, SwAV, MoCo-v2 or BYOL chooses that method's recipe on ImageNet; for a file add
  `--recipe ssl/swav` or another. Supervised and semi-supervised weights of the zoo have seen ImageNet's labels;
  their cards say so.
- **Not there**: AlexNet, RegNet, XCiT, and colourisation, whose network sees Lab images. Files of FSDP shards must be
  consolidated in VISSL.

lightly's ImageNet benchmarks have cards too (`lightly-*`, ten ResNet-50).

## What `--init` takes

`--init` takes a card's name, a file, a folder (TensorFlow checkpoint, SavedModel, one of our run
folders, a Hugging Face folder), `timm:NAME`, `hf:owner/name`, or `none`. The format is found by
content, never by a file's name, and the network is read from the shapes of the tensors. Every
tensor is accounted for: loaded, reset or dropped, by name, in `init.json` and in `finetune-mile
weights check FILE --names`. A name or a shape that does not fit stops the load.

A file of your own gets a card, with its hash, network and first features, in your configuration folder
(`FINETUNE_MILE_CONFIG`, else `~/.config/finetune_mile`). `--init mine` then finds it from any folder, and
refuses it if the file changed. `verify` fetches a card's file, loads it and records what it saw beside your cards:

```bash
finetune-mile weights add runs/pretrain-1/export/model.safetensors --name mine --citation "our lab, 2026"
finetune-mile weights verify mine
```

The published files could not be fetched where this was written, so their cards have no features yet, and most have no
hash.
If you could fetch one, send in what you saw: open an issue or a pull request with the record
(`~/.config/finetune_mile/weights/verified/NAME.json`). Its hashes, sizes and features go onto the card, which then says
`verified: true`; from then on every other user's file is compared with yours. `finetune-mile check`
adds the accuracies that it measured to the record ([imagenet.md](imagenet.md)).

- **Several backbones in one file** (online and momentum, student and teacher): formats that we know
  say which one to take. In other files it is the one that is not called momentum, target, key or ema.
  The load report names the others; `--init 'FILE::teacher'` takes the one whose prefix has that part,
  `--init 'FILE::.'` the one without a prefix.
  Where nothing tells, the load stops and prints the ways to type. SimCLR-v2's EMA copy is
  `--init simclrv2-sk1::ema_model`. A part that is picked keeps the format of the complete file: its
  padding, its input and its stem.
- **Whose file it is**: some files do not show the conventions of their format, such as an extracted
  backbone. `--format solo-learn` names the format; so do `FILE::solo-learn` and `load(..., format=)`.
- **What is assumed**: a file that has nothing but the names of a network is read as torchvision's (or
  timm's) network. The load report lists what no tensor shows, with the flag to say otherwise. The
  loader assumes stride in the 3x3 (`-v1`: in the 1x1), max-pooling after a 7x7 stem (`-nopool`) and
  none after a 3x3 stem (`-pool`). It also assumes ReLU, epsilon 1e-5 in the batch norms, no
  anti-aliasing and no dilation. `finetune-mile weights check FILE` shows it.
- **Parts inside a backbone that we do not know**, such as attention modules, stop the load: without
  them the features would be wrong. Modules beside it (heads, queues, copies) are dropped.
- **Objects beside the weights** (settings with `functools.partial`, metrics, generators) stay inert: no
  file runs code. A file that calls a function which could act is refused. TorchScript is refused with
  the line that saves its weights.
- **Pickles** (`.pth`, `.pt`, `.ckpt`, `.pkl`) are read in a separate process, which imports nothing
  that the file names. It describes the tensors; the command then maps them from the file. The process
  may use 256 MB of memory and 8 times the size of the pickle. It may take 4 seconds of processor time
  and one more for each 16 MB. A file that needs more is refused. These limits are complete on Linux.
  macOS limits the time but not the memory. Windows has neither: there the process is stopped after a
  minute (more for a large pickle). Files of safetensors and TensorFlow hold no pickle and are read
  without a second process.
- **Names** are bounded in every kind of file: 50,000 tensors, 1,000 letters for each name with its path,
  16 MB for all. What else a file's names, shapes or config make our code raise is told in one sentence
  ([SECURITY.md](../SECURITY.md)).
- **Heads** are always new in a run. A classifier in the file has seen labels (SimCLR-v2's
  `head_supervised` all of ImageNet's); it is used only when it is named, by `keep_head`. It
  expects the backbone's features. With `head_from: 1` the features are those of the projection, so it
  is refused there, except for our own exports.
- **The classifier that a run trained**: `finetune_mile.load_classifier(RUN)` loads it, with its
  classes and `.predict("photo.jpg")`; `finetune_mile.load(RUN, num_classes=C)` does not, and warns.
  `finetune-mile weights convert RUN OUT` (also `--to timm`) keeps it; `--drop-head` leaves it out.
  The classifier of another file is left out unless `--keep-head NAME` asks for it.
- **Padding** has no tensors, so a wrong choice loads without a complaint and shifts every feature. It
  comes with the format. `torch` is symmetric, `tf` is SimCLR's (SAME pooling), `same` is haiku's
  (SAME everywhere). `port` is that of the PyTorch port of SimCLR-v2 as the published MILe code runs
  it.
- **A 3x3 stem** has padding 1 in most code and padding 2 in solo-learn. The files of solo-learn
  itself are recognised, except those from before April 2022 without a momentum copy. The load stops
  and asks where a file does not tell: such a file, an extracted backbone, your own module with
  `backbone` and `classifier`. `--arch resnet18-cifar` is padding 1, `--arch resnet18-cifar2` is
  padding 2. In Python it is `finetune_mile.load(FILE, arch=...)`; with `--model` and `--teacher`,
  append it to the file, `FILE::resnet18-cifar`.
- **Other things that no tensor shows** are part of the network's name, so that exports keep them.
  `resnet18-nopool` has no max-pooling after a 7x7 stem (lightning-bolts on STL-10). `-norelu` has no
  ReLU after `bn1` (a Sequential of the children of lightly's ResNetGenerator).
  `timm:vit_small_patch16_224:heads=12` has another number of attention heads than timm's (MoCo-v3).
  They are read from the file where it tells, and can be given with `--arch`.
- **Vision transformers, ConvNeXt, Swin, transformers' folders and shards**: docs/vits.md.
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

Our tests (`tests/checkpoints/rewriting.py`) wrote these files after the formats' sources. They used
the weights of the files above and the features of their upstream networks. Where only one size is
given, torchvision's or timm's own network is the reference. This measures our adapter against our
reading of the format, not against a file of the upstream.
"""


_SAMPLES = """\
## Measured: what becomes of files that upstream's code wrote

Each sample is a small description of a file, with the features that upstream's own network gives. A
sample is *exact* if the largest difference is below 1e-4 of the largest feature, and no plausible
misreading is near. For one that *asks*, the load stops, and every way that its message prints was
executed. The features of `timm_resnetaa50` and `timm_resnetblur50` are wrong without `--arch`.
Nothing in their flat files shows anti-aliasing, and the load report says that none is assumed.
"""
BEGIN, END = "<!-- samples: python -m tests.checkpoints.upstream -->\n", "<!-- end of samples -->\n"


def write_docs(out: Path, *, parity: Path | None, rewritten: Path | None) -> None:
    """Write docs/checkpoints.md from the cards, the adapters and the folders that are measured on the spot.

    Tables that are not measured now are kept as they are in the page.
    """
    from finetune_mile.checkpoints.adapters import ADAPTERS

    formats = []
    for name, adapter in ADAPTERS.items():
        mean, std = adapter.preprocess.mean, adapter.preprocess.std
        wants = "[0, 1]" if std == (1.0, 1.0, 1.0) else f"mean {mean[0]}, ... deviation {std[0]}, ..."
        formats.append((f"`{name}`", adapter.method, adapter.padding, wants))
    cards = []
    for card in sorted(map(read_card, shipped("weights").glob("*.yaml")), key=lambda card: card.name):
        top1 = "" if card.linear_top1 is None else f"{card.linear_top1:g}"
        knn = "" if card.knn_top1 is None else f"{card.knn_top1:g} (k {card.knn_k})"
        tuned = ", ".join(f"{value:g} ({float(part):.0%})" for part, value in card.finetune_top1.items())
        seen = "yes" if card.verified else "unverified"
        if top1 and card.scores_on != "ImageNet-1k":
            top1 += f" ({card.scores_on})"
        seen = seen if card.file else "not published"
        size, pixels = str(card.size_mb or ""), str(card.preprocess.size)
        facts = (card.method, card.arch or "", card.data, top1, knn, tuned, card.licence, size, pixels, seen)
        cards.append((f"`{card.name}`", *facts))
    old = out.read_text(encoding="utf-8") if out.is_file() else ""
    strong = [
        (f"`{card.name}`", (card.arch or "").removeprefix("timm:").partition(":")[0], card.licence, str(card.size_mb),
         *("" if top1 is None else f"{top1:.1f}" for top1 in (card.knn_top1, card.linear_top1)))
        for card in sorted(map(read_card, shipped("weights").glob("*.yaml")), key=lambda card: -(card.linear_top1 or 0))
        if card.name.startswith(("dinov2-", "dino-", "ibot-", "mae-"))
    ]  # fmt: skip
    table = _markdown(("card", "network", "licence", "MB", "k-NN", "linear"), strong)
    parts = [
        _HEAD.replace("<STRONG>", f"{_STRONG}{table}\n{_FETCHING}"),
        "## Formats, in the order in which they are tried\n\n"
        + _markdown(("format", "made by", "padding", "input"), formats),
        f"{_SAMPLES}\n{BEGIN}{old.partition(BEGIN)[2].partition(END)[0]}{END}",
        *(f"{title}\n{_measured(folder)}" if folder else _kept(old, title)
          for title, folder in ((_UPSTREAM, parity), (_REWRITTEN, rewritten))),
        f"## Cards ({len(cards)})\n\n"
        "Accuracies as published, in per cent of ImageNet's validation images if nothing else is said; `weights show\n"
        "NAME` says where. MB: the network's weights; a file with heads or an optimiser is larger. Input: pixels.\n"
        "`unverified`: nobody here could fetch the published file.\n\n"
        + _markdown(
            ("card", "method", "network", "data", "linear top-1", "k-NN", "fine-tuned top-1", "licence", "MB", "input",
             "loaded"),
            cards,
        ),
    ]  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(filter(None, parts)), encoding="utf-8")


def _kept(page: str, title: str) -> str:
    """The section of a page that begins with this title, or nothing."""
    heading = title.splitlines()[0] + "\n"
    body = page.partition(heading)[2].partition("\n## ")[0]
    return f"{heading}{body}" if body else ""


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


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.weights_page", description=__doc__)
    parser.add_argument("--parity", type=Path, help="folder of checkpoints that upstream code wrote")
    parser.add_argument("--rewritten", type=Path, help="the same for those that our tests wrote")
    parser.add_argument("--out", type=Path, default=Path("docs/checkpoints.md"))
    options = parser.parse_args()
    try:
        write_docs(options.out, parity=options.parity, rewritten=options.rewritten)
    except Problem as problem:
        return tell(problem)
    print(f"{options.out} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
