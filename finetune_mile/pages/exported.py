"""A trained classifier in the form of another tool, with its model card, checked before it is left in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from finetune_mile.checkpoints import exporting
from finetune_mile.checkpoints.loading import Opened
from finetune_mile.core.files import begun, read_scores, write_json, write_whole
from finetune_mile.pages.card import Form, model_card

PROGRAMS = {"onnx": "model.onnx", "torch": "model.pt2"}
NOTES = (
    "arch", "classes", "activation", "threshold", "thresholds", "size", "crop", "interpolation", "antialias", "mean",
    "std",
)  # fmt: skip


def export(opened: Opened, out: Path, form: Form, *, run: Path, pixels: bool = False) -> float:
    """Write an export and its model card into a folder that is new or empty, complete or not at all.

    Args:
        opened: a network with its classifier.
        out: the folder.
        form: the tool that it is for.
        run: where it is from: results.json beside it goes into the card.
        pixels: of a program: take pixels from 0 to 255 and normalise them inside.

    Returns:
        By how much the logits differ from ours.
    """
    with begun(out) as part:
        return _write(opened, part, form, run, pixels)


def _write(opened: Opened, part: Path, form: Form, run: Path, pixels: bool) -> float:
    config, call, network = _config(opened), "", opened.network
    images = torch.randn(3, 3, config["size"], config["size"], generator=torch.Generator().manual_seed(0))
    if pixels:
        network = exporting.OnPixels(network, config["mean"], config["std"]).eval()
        images = (images * 64 + 128).clamp(0, 255).to(torch.uint8)
    if form == "onnx":
        notes = {key: json.dumps(config[key]) for key in NOTES if key in config}
        other: Any = exporting.write_onnx(part / PROGRAMS["onnx"], network, images, notes)
    elif form == "torch":
        other = exporting.write_torch(part / PROGRAMS["torch"], network, images)
    else:
        import timm

        kind = "multi_label_classification" if config["activation"] == "sigmoid" else "single_label_classification"
        # By these entries transformers knows its wrapper of timm's networks.
        wrapper = {
            "architectures": ["TimmWrapperForImageClassification"], "model_type": "timm_wrapper", "problem_type": kind,
        }  # fmt: skip
        call = exporting.write_timm(part, network, config, wrapper if form == "hf" else None)
        written = json.loads((part / "config.json").read_text(encoding="utf-8"))
        other = timm.create_model(
            written["architecture"], num_classes=written["num_classes"],
            checkpoint_path=str(part / "model.safetensors"), **written.get("model_args", {}),
        ).eval()  # fmt: skip
    worst = exporting.check_equal(network, other, images, f"--to {form}")
    if form in PROGRAMS:
        write_json(part / "config.json", {key: config[key] for key in (*NOTES, "num_classes") if key in config})
    card = model_card(config, _results(run), form, call=call, pixels=pixels)
    write_whole(part / "README.md", card)
    return worst


def _config(opened: Opened) -> dict[str, Any]:
    """The facts of an export, whatever was opened."""
    unsaid = {"threshold": exporting.THRESHOLD, "licence": opened.card.licence, "method": opened.card.method}
    return unsaid | opened.config | {
        **opened.card.preprocess.model_dump(mode="json"), "arch": opened.report.arch, "padding": opened.report.padding,
        "num_classes": opened.report.classifier, "classes": list(opened.classes or ()),
        "activation": opened.activation or "softmax",
    }  # fmt: skip


def _results(run: Path) -> dict[str, float]:
    """results.json of a run, given by its folder, its export or the file there; empty where there is none."""
    for folder in (run, run.parent, run.parent.parent):
        if (folder / "results.json").is_file() and (folder / "recipe.yaml").is_file():
            return read_scores(folder / "results.json")
    return {}
