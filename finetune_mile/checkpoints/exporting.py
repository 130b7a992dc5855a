"""The form in which our weights leave and come back: safetensors in torchvision's names, and a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from finetune_mile.networks.heads import build, new_head
from finetune_mile.problems import Problem
from finetune_mile.runlog import whole_file, write_json


def write_export(folder: Path, network: nn.Module, config: dict[str, Any], card: str) -> None:
    """Write model.safetensors, config.json and README.md (the model card) into `folder`, each at once."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
    with whole_file(folder / "model.safetensors") as part:
        save_file(tensors, part, metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    with whole_file(folder / "README.md") as part:
        part.write_text(card, encoding="utf-8")


def read_export(source: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A network with its head, in eval mode, from an export: its folder, its run folder, or its weights file."""
    from safetensors.torch import load_file

    folder = source.parent if source.is_file() else source
    folder = folder / "export" if (folder / "export").is_dir() else folder
    for name in ("model.safetensors", "config.json"):
        if not (folder / name).is_file():
            raise Problem(f"{source}: no {name} there; an export of a finished run has one (RUN/export)")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    network = build(config["arch"], padding=config["padding"])
    new_head(network, config["num_classes"], "zero")
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.eval(), config
