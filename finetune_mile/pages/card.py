"""The model card (README.md) of an export: results, data, licence, limits, and how to load it. No local path."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any, Literal

import yaml
from jinja2 import Environment, PackageLoader

from finetune_mile.core.problems import inert

Form = Literal["own", "timm", "hf", "onnx", "torch"]
MEASURES = (
    "accuracy",
    "test_accuracy",
    "map",
    "test_map",
    "real_acc",
    "f1@0.25",
    "f1@0.5",
    "trivial_f1",
    "lrap",
    "coverage@0.25",
)
LIBRARY = {"own": "finetune_mile", "timm": "timm", "hf": "transformers", "onnx": "onnx", "torch": "pytorch"}
UNKNOWN = dict.fromkeys(("method", "data", "init", "licence"), "unknown")
LONGEST_FACT = 200  # characters


def prose(value: object, most: int = LONGEST_FACT) -> str:
    """A fact as plain text in Markdown: no HTML, no link, no picture, on one line."""
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", html.escape(inert(str(value), most), quote=False))


def code(value: object) -> str:
    """A fact inside backticks or a block of code, where only a backtick or a line's end would end it."""
    return inert(str(value), LONGEST_FACT).replace("`", "'")


TEMPLATES = Environment(loader=PackageLoader("finetune_mile.pages"), trim_blocks=True, keep_trailing_newline=True)
TEMPLATES.filters |= {"prose": prose, "code": code}


def public_name(init: str) -> str:
    """What --init named, without the folders that lead to it on this machine: `/data/me/moco.pth` is `moco.pth`."""
    where, mark, choice = init.partition("::")
    return init if where.startswith(("hf:", "timm:")) else PureWindowsPath(where).name + mark + choice


def model_card(
    config: Mapping[str, Any], results: Mapping[str, float], form: Form, *, call: str = "", pixels: bool = False
) -> str:
    """A model card that the hub understands.

    Args:
        config: of the run's export. What only a run knows (data, steps, licence, ...) may be missing.
        results: results.json of the run; empty where there is none.
        form: what the export is for.
        call: arguments of `timm.create_model`.
        pixels: the exported network takes pixels from 0 to 255 and normalises them itself.
    """
    facts: dict[str, Any] = UNKNOWN | dict(config)
    metrics = [{"type": key, "value": round(results[key], 2)} for key in MEASURES if key in results]
    front: dict[str, Any] = {
        "library_name": LIBRARY[form], "pipeline_tag": "image-classification",
        "tags": ["image-classification", "finetune_mile", facts["method"]],
    }  # fmt: skip
    if metrics:
        data = {"name": facts["data"], "type": facts["data"]}
        scores = {"task": {"type": "image-classification"}, "dataset": data, "metrics": metrics}
        front["model-index"] = [{"name": f"{facts['arch']}-{facts['method']}", "results": [scores]}]
    values = facts | {
        "front": yaml.safe_dump(front, sort_keys=False), "form": form, "metrics": metrics, "call": call,
        "pixels": pixels, "init": public_name(facts["init"]), "images": int(results.get("images", 0)),
        "test_images": int(results.get("test_images", 0)), "mean": list(facts["mean"]), "std": list(facts["std"]),
        "intervals": {
            key: f"{results[f'{key}_low']:.1f} to {results[f'{key}_high']:.1f}"
            for key in MEASURES if f"{key}_low" in results
        },
        "smooth": facts.get("antialias", True) and facts["interpolation"] != "nearest",
    }  # fmt: skip
    return TEMPLATES.get_template("card.md").render(values)
