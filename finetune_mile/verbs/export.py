"""`finetune-mile export`: a trained classifier for other tools, checked before it is left in place (docs/export.md)."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_mile.checkpoints.init import parse_source
from finetune_mile.config.flags import Parser
from finetune_mile.core.files import check_empty
from finetune_mile.core.problems import Problem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.loading import Opened

EPILOG = """examples:
  finetune-mile export runs/demo-1 --to onnx --preprocess --out onnx
  finetune-mile export runs/photos-1 --to timm --out timm
  finetune-mile export runs/photos-1 --to hf --out hf

DIR/README.md is a model card with the lines that load the model. The logits are compared with ours first.
"""
FORMS = {
    "timm": "model.safetensors for timm.create_model(..., checkpoint_path=)",
    "hf": "the same for transformers' pipeline",
    "onnx": "model.onnx, for any batch size",
    "torch": "model.pt2 of torch.export, for any batch size",
}
NEEDS = {"onnx": ("onnx", "onnxscript", "onnxruntime")}
OLDEST = {"onnx": {"torch": (2, 7), "onnxscript": (0, 7)}}  # CONTRIBUTING.md has what was tried
PROGRAMS = {"onnx": "model.onnx", "torch": "model.pt2"}
PART = ".part"  # in DIR, until everything is checked
NOTES = (
    "arch",
    "classes",
    "activation",
    "threshold",
    "thresholds",
    "size",
    "crop",
    "interpolation",
    "antialias",
    "mean",
    "std",
)


def build_parser() -> Parser:
    parser = Parser(
        prog="finetune-mile export", allow_abbrev=False, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write a trained classifier in the form of another tool, with a model card.",
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="a run folder, its export, or a checkpoint file with a classifier")
    forms = "; ".join(f"{form}: {text}" for form, text in FORMS.items())
    parser.add_argument("--to", choices=tuple(FORMS), required=True, help=forms)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="a folder that is new or empty")
    parser.add_argument(
        "--preprocess", action="store_true",
        help="onnx and torch: take pixels from 0 to 255 (uint8) and normalise them inside",
    )  # fmt: skip
    return parser


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 the exported network gives other logits, 2 the command or its input was wrong."""
    options = build_parser().parse_args(argv)
    problems = []
    if options.preprocess and options.to not in PROGRAMS:
        problems.append(f"--preprocess is for --to onnx and --to torch; leave it out for --to {options.to}")
    missing = " ".join(name for name in NEEDS.get(options.to, ()) if find_spec(name) is None)
    if missing:
        problems.append(f"--to {options.to} needs packages that are not installed: pip install {missing}")
    oldest = OLDEST.get(options.to, {})
    if old := [f"{name} {found}" for name, least in oldest.items() if (found := _too_old(name, least))]:
        needed = " and ".join(f"{name} {least[0]}.{least[1]}" for name, least in oldest.items())
        problems.append(
            f"--to {options.to} needs {needed} or newer (installed: {', '.join(old)}): "
            "pip install -U torch torchvision onnxscript"
        )
    try:
        parse_source(options.run, "RUN")
        check_empty(options.out, "--out")
    except Problem as problem:
        problems += problem.sentences
    if problems:
        raise Problem(*problems)
    from finetune_mile.checkpoints.classifier import open_with_head

    opened = open_with_head(options.run, "RUN")
    part, made = options.out / PART, not options.out.exists()
    try:
        part.mkdir(parents=True)
        worst = _write(options, opened, part)
        for path in sorted(part.iterdir(), key=lambda path: path.name == "README.md"):
            path.rename(options.out / path.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if made and options.out.is_dir() and not any(options.out.iterdir()):
            options.out.rmdir()
    sys.stdout.write(
        f"{options.out}: {opened.report.arch}, {opened.report.classifier} classes, for {options.to}; the logits differ "
        f"from ours by {worst:.1g} at most. {options.out / 'README.md'} shows how to load it.\n"
    )
    return 0


def _too_old(name: str, least: tuple[int, int]) -> str:
    """The installed version of a package if it is older than `least`, else nothing."""
    try:
        found = version(name)
    except PackageNotFoundError:  # missing, or installed under another name
        return ""
    return found if tuple(map(int, re.findall(r"\d+", found)[:2])) < least else ""


def _write(options: argparse.Namespace, opened: Opened, part: Path) -> float:
    """Write everything into `part`; returns by how much the logits differ."""
    import torch

    from finetune_mile.checkpoints.exporting import OnPixels, check_equal, write_onnx, write_timm, write_torch
    from finetune_mile.core.files import write_json
    from finetune_mile.pages.card import model_card

    config, flag, call = _config(opened), f"--to {options.to}", ""
    network, size = opened.network, config["size"]
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    if options.preprocess:
        network = OnPixels(network, config["mean"], config["std"]).eval()
        images = (images * 64 + 128).clamp(0, 255).to(torch.uint8)
    if options.to == "onnx":
        notes = {key: json.dumps(config[key]) for key in NOTES if key in config}
        other: Any = write_onnx(part / PROGRAMS["onnx"], network, images, notes)
    elif options.to == "torch":
        other = write_torch(part / PROGRAMS["torch"], network, images)
    else:
        import timm

        call = write_timm(part, network, config, _wrapper(config) if options.to == "hf" else None)
        written = json.loads((part / "config.json").read_text(encoding="utf-8"))
        other = timm.create_model(
            written["architecture"],
            num_classes=written["num_classes"],
            checkpoint_path=str(part / "model.safetensors"),
            **written.get("model_args", {}),
        ).eval()
    worst = check_equal(network, other, images, flag)
    if options.to in PROGRAMS:
        write_json(part / "config.json", {key: config[key] for key in (*NOTES, "num_classes") if key in config})
    card = model_card(config, _results(Path(options.run)), options.to, call=call, pixels=options.preprocess)
    (part / "README.md").write_text(card, encoding="utf-8")
    return worst


def _config(opened: Opened) -> dict[str, Any]:
    """The facts of an export, whatever was opened."""
    from finetune_mile.checkpoints.exporting import THRESHOLD

    return {"threshold": THRESHOLD, "licence": opened.card.licence, "method": opened.card.method} | opened.config | {
        **opened.card.preprocess.model_dump(mode="json"), "arch": opened.report.arch, "padding": opened.report.padding,
        "num_classes": opened.report.classifier, "classes": list(opened.classes or ()),
        "activation": opened.activation or "softmax",
    }  # fmt: skip


def _wrapper(config: dict[str, Any]) -> dict[str, Any]:
    """The entries of config.json by which transformers knows its wrapper of timm's networks."""
    several = config["activation"] == "sigmoid"
    return {
        "architectures": ["TimmWrapperForImageClassification"], "model_type": "timm_wrapper",
        "problem_type": "multi_label_classification" if several else "single_label_classification",
    }  # fmt: skip


def _results(run: Path) -> dict[str, float]:
    """results.json of a run, given by its folder, its export or the file there; empty where there is none."""
    for folder in (run, run.parent, run.parent.parent):
        if (folder / "results.json").is_file() and (folder / "recipe.yaml").is_file():
            results: dict[str, float] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            return results
    return {}
