"""Features of checkpoints for a data set: what `embed`, `probe` and `quickstart` ask for. torch is imported late."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from finetune_mile.checkpoints.cards import fetch_card, find_card
from finetune_mile.checkpoints.init import Init, parse_init
from finetune_mile.config.flags import FORMAT, Flags, attempt, check_all, outside
from finetune_mile.core.types import LARGEST_BATCH, MOST_WORKERS
from finetune_mile.images.sources import load_data, split_name

if TYPE_CHECKING:
    from accelerate import Accelerator

    from finetune_mile.compute.rows import Dtype, Split, Store
    from finetune_mile.images.order import Indices
    from finetune_mile.images.sets import Data
    from finetune_mile.training.processes import Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Which features are computed, and how they are kept."""

    inits: list[Init]  # the checkpoints
    data: str  # --data
    arch: str | None = None  # where the checkpoint does not say it
    size: int | None = None  # image side; None: the checkpoint's
    dtype: Dtype = "float16"  # on disk
    verify: bool = False  # identify images by their contents
    batch_size: int = 128  # over all processes
    workers: int | None = None  # loader processes; None: from the cores

    @classmethod
    def of_flags(cls, options: Namespace, inits: list[str], *problems: str) -> Self:
        """The value of flags and of the texts of --init; no torch yet.

        All that cannot work is refused at once, after other `problems`.
        """
        told = [*problems, *outside(options, **RANGES)]
        attempt(told, split_name, options.data)
        opened = [init for text in inits if (init := attempt(told, parse_init, text)) is not None]
        check_all(told)
        for init in opened:
            if init.kind == "card":
                fetch_card(find_card(init.name))
        names = {each.name for each in fields(cls)} & vars(options).keys()
        return cls(inits=opened, **{name: getattr(options, name) for name in names})

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
        self, accelerator: Accelerator, signals: Signals, *, path: Path | None = None, views: int = 0
    ) -> tuple[Store, Data]:
        """The features of all images, labelled or not, of one checkpoint; and the images."""
        data = load_data(self.data, need_labels=False)
        return self.features(self.inits[0], data, accelerator, signals, path=path, views=views), data


FLAGS: Flags = {  # of an `Embedding`, and --format
    "--data": {"required": True, "help": "as for `run`: demo, folder:DIR, hf:NAME, csv:FILE, ..."},
    "--arch": {"help": "network, where the checkpoint does not say it"},
    "--format": {"help": FORMAT},
    "--size": {"type": int, "help": "image side (default: as the checkpoint says)"},
    "--dtype": {"choices": ("float16", "float32"), "default": "float16", "help": "on disk (default: float16)"},
    "--verify": {
        "action": "store_true",
        "help": "identify images by their contents, instead of path, size and modification time",
    },
    "--batch-size": {"type": int, "default": 128, "help": "over all processes (default: %(default)s)"},
    "--workers": {"type": int, "help": "loader processes (default: from the cores)"},
}
RANGES = {
    "size": (1, 8192), "batch_size": (1, LARGEST_BATCH), "workers": (0, MOST_WORKERS), "views": (0, 1000),
    "seeds": (1, 1000), "k": (1, 10**6),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Probing(Embedding):
    """A comparison of checkpoints by their features."""

    fraction: float  # share of the labels to use
    seeds: int  # draws of the labels
    k: int  # neighbours that vote

    def compare(self, accelerator: Accelerator, signals: Signals) -> dict[str, Any] | None:
        """Compare by k-NN and linear probes on the features; None in other processes than the first."""
        import numpy as np

        from finetune_mile.images.splits import labelled_pools
        from finetune_mile.measures.probing import floor, measure_of, probe, ranking

        data = load_data(self.data)
        fraction = self.fraction
        seeds = 1 if fraction == 1 else self.seeds  # all labels are the same labels in every draw
        labelled = [labelled_pools(data, fraction=fraction, seed=seed).indices["labelled"] for seed in range(seeds)]
        needed: dict[Split, Indices] = {"train": np.unique(np.concatenate(labelled)), "val": np.arange(len(data.val))}
        probed, facts = {}, {}
        for init in self.inits:
            began = time.monotonic()
            store = self.features(init, data, accelerator, signals, rows=needed)
            embedded = time.monotonic()
            if not accelerator.is_main_process:
                continue
            probed[init.text] = probe(store, data, labelled, k=self.k)
            facts[init.text] = {
                "features": store.features("train").shape[1], "store": str(store.path),
                "seconds_features": round(embedded - began, 2), "seconds_probes": round(time.monotonic() - embedded, 2),
            }  # fmt: skip
        if not accelerator.is_main_process:
            return None
        name, majority = floor(data)
        return {
            "data": data.name, "fraction": fraction, "seeds": seeds, "k": self.k, "labels": len(labelled[0]),
            "images": len(data.val), "classes": len(data.classes), "measure": measure_of(data.val.given),
            "floor": name, "majority": majority, "probes": [row | facts[row["init"]] for row in ranking(probed)],
        }  # fmt: skip
