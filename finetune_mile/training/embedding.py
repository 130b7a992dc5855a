"""Features of checkpoints for a data set: what `embed`, `probe` and `quickstart` ask for. torch is imported late."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.checkpoints.cards import fetch_card, find_card
from finetune_mile.checkpoints.init import Init, parse_init
from finetune_mile.config.flags import FORMAT, Parser, check_all, outside
from finetune_mile.core.types import LARGEST_BATCH, MOST_WORKERS
from finetune_mile.images.sources import load_data, split_name

if TYPE_CHECKING:
    from accelerate import Accelerator

    from finetune_mile.compute.rows import Dtype, Split, Store
    from finetune_mile.images.order import Indices
    from finetune_mile.images.sets import Data
    from finetune_mile.training.processes import Signals

MOST_VIEWS, LARGEST_SIZE = 1000, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """How features are computed and kept."""

    data: str  # --data
    arch: str | None = None  # where the checkpoint does not say it
    size: int | None = None  # image side; None: the checkpoint's
    dtype: Dtype = "float16"  # on disk
    verify: bool = False  # identify images by their contents
    batch_size: int = 128  # over all processes
    workers: int | None = None  # loader processes; None: from the cores

    @classmethod
    def of_flags(cls, options: argparse.Namespace) -> Embedding:
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls)})

    def features(
        self, init: Init, data: Data, accelerator: Accelerator, signals: Signals, *, path: Path | None = None,
        rows: dict[Split, Indices] | None = None, views: int = 0,
    ) -> Store:  # fmt: skip
        """The features of one checkpoint, computed where they are not on disk; arguments as in `training.features`."""
        from finetune_mile.checkpoints.loading import open_trunk
        from finetune_mile.training.features import FeatureSet, embed, full_name
        from finetune_mile.training.processes import Device
        from finetune_mile.training.task import wanted_workers

        opened = open_trunk(init, arch=self.arch)
        own = {} if self.size is None else {"size": self.size}
        device = Device(
            accelerator=accelerator, signals=signals, batch_size=self.batch_size,
            workers=wanted_workers(self.workers, data, accelerator),
        )  # fmt: skip
        preprocess = opened.card.preprocess.model_copy(update=own)
        wanted = FeatureSet(
            data=data, network=opened.network, arch=full_name(opened.report), preprocess=preprocess, dtype=self.dtype,
            precision=accelerator.mixed_precision, contents=self.verify,
        )  # fmt: skip
        about = {"init": init.text, "data": self.data}
        return embed(device, wanted, about=about, path=path, rows=rows, views=views)

    def everything(
        self, init: Init, accelerator: Accelerator, signals: Signals, *, path: Path | None = None, views: int = 0
    ) -> Store:
        """The features of all images, labelled or not."""
        data = load_data(self.data, need_labels=False)
        return self.features(init, data, accelerator, signals, path=path, views=views)


def add_flags(parser: Parser) -> None:
    """The flags of an `Embedding`."""
    parser.add_argument("--data", required=True, help="as for `run`: demo, folder:DIR, hf:NAME, csv:FILE, ...")
    parser.add_argument("--arch", help="network, where the checkpoint does not say it")
    parser.add_argument("--format", help=FORMAT)
    parser.add_argument("--size", type=int, help="image side (default: as the checkpoint says)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="on disk (default: float16)")
    parser.add_argument(
        "--verify", action="store_true",
        help="identify images by their contents, instead of path, size and modification time",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=128, help="over all processes (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="loader processes (default: from the cores)")


def check_flags(options: argparse.Namespace, texts: list[str]) -> list[Init]:
    """The checkpoints of --init; all that cannot work is refused, before torch is imported."""
    ranges = {
        "size": (1, LARGEST_SIZE), "batch_size": (1, LARGEST_BATCH), "workers": (0, MOST_WORKERS),
        "views": (0, MOST_VIEWS),
    }  # fmt: skip
    inits: list[Init] = []
    check_all(
        outside(options, **{name: ranges[name] for name in ranges if name in options}),
        lambda: split_name(options.data),
        lambda: inits.extend(map(parse_init, texts)),
    )
    for init in inits:
        if init.kind == "card":
            fetch_card(find_card(init.name))
    return inits


def probe_checkpoints(
    inits: list[Init],
    how: Embedding,
    accelerator: Accelerator,
    signals: Signals,
    *,
    fraction: float,
    seeds: int,
    k: int,
) -> dict[str, Any] | None:
    """Compare checkpoints by k-NN and linear probes on their features; None in other processes than the first.

    Args:
        inits: the checkpoints.
        how: data and features.
        accelerator: for devices and processes.
        signals: that may stop it.
        fraction: share of the labels to use.
        seeds: draws of the labels.
        k: neighbours that vote.
    """
    import numpy as np

    from finetune_mile.images.splits import labelled_pools
    from finetune_mile.measures.probing import floor, measure_of, probe, ranking

    data = load_data(how.data)
    seeds = 1 if fraction == 1 else seeds  # all labels are the same labels in every draw
    labelled = [labelled_pools(data, fraction=fraction, seed=seed).indices["labelled"] for seed in range(seeds)]
    needed: dict[Split, Indices] = {"train": np.unique(np.concatenate(labelled)), "val": np.arange(len(data.val))}
    probed, facts = {}, {}
    for init in inits:
        began = time.monotonic()
        store = how.features(init, data, accelerator, signals, rows=needed)
        embedded = time.monotonic()
        if not accelerator.is_main_process:
            continue
        probed[init.text] = probe(store, data, labelled, k=k)
        facts[init.text] = {
            "features": store.features("train").shape[1], "store": str(store.path),
            "seconds_features": round(embedded - began, 2), "seconds_probes": round(time.monotonic() - embedded, 2),
        }  # fmt: skip
    if not accelerator.is_main_process:
        return None
    name, majority = floor(data)
    return {
        "data": data.name, "fraction": fraction, "seeds": seeds, "k": k, "labels": len(labelled[0]),
        "images": len(data.val), "classes": len(data.classes), "measure": measure_of(data.val.given),
        "floor": name, "majority": majority, "probes": [row | facts[row["init"]] for row in ranking(probed)],
    }  # fmt: skip
