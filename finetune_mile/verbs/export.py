"""`finetune-mile export`: a trained classifier for other tools, checked before it is left in place (docs/export.md)."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from finetune_mile.checkpoints.init import parse_source
from finetune_mile.config.flags import Flags, check_all, verb_parser
from finetune_mile.core.files import check_empty

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


FLAGS: Flags = {
    "run": {"metavar": "RUN", "help": "a run folder, its export, or a checkpoint file with a classifier"},
    "--to": {
        "choices": tuple(FORMS),
        "required": True,
        "help": "; ".join(f"{form}: {text}" for form, text in FORMS.items()),
    },
    "--out": {"type": Path, "metavar": "DIR", "required": True, "help": "a folder that is new or empty"},
    "--preprocess": {
        "action": "store_true",
        "help": "onnx and torch: take pixels from 0 to 255 (uint8) and normalise them inside",
    },
}


def main(argv: list[str]) -> int:
    """The command: 0 fine, 1 the exported network gives other logits, 2 the command or its input was wrong."""
    about = "Write a trained classifier in the form of another tool, with a model card."
    options = verb_parser("export", FLAGS, description=about, epilog=EPILOG).parse_args(argv)
    problems = []
    if options.preprocess and options.to not in ("onnx", "torch"):
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
    check_all(problems, lambda: parse_source(options.run, "RUN"), lambda: check_empty(options.out, "--out"))
    from finetune_mile.checkpoints.loading import open_with_head
    from finetune_mile.pages.exported import export

    opened = open_with_head(options.run, "RUN")
    worst = export(opened, options.out, options.to, run=Path(options.run), pixels=options.preprocess)
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
