"""`finetune-mile VERB ...`: one module per verb, imported when it is called. No torch here."""

from __future__ import annotations

import importlib
import sys

from finetune_mile import __version__
from finetune_mile.core.cores import wait_quietly
from finetune_mile.core.files import told
from finetune_mile.core.problems import Problem, did_you_mean, tell

# Verb: (module with main(argv) -> exit code, what it does).
VERBS: dict[str, tuple[str, str]] = {
    "run": ("finetune_mile.run", "fine-tune a checkpoint, or train from scratch (`train` is the same)"),
    "quickstart": ("finetune_mile.verbs.quickstart", "your photos: compare methods in minutes, on one page"),
    "pretrain": ("finetune_mile.paper.pretrain", "pre-train without labels: SimCLR, MoCo-v2, BYOL or SwAV"),
    "embed": ("finetune_mile.verbs.embed", "compute features of a checkpoint once, for probe and run"),
    "probe": ("finetune_mile.verbs.probe", "compare checkpoints on your images by k-NN and linear probes"),
    "audit": ("finetune_mile.verbs.audit", "find labels that are wrong or missing, duplicates, outliers; correct them"),
    "table": ("finetune_mile.paper.table", "run the missing cells of a table, write its results"),
    "check": ("finetune_mile.verbs.check", "before a run: data, checkpoint, a few steps, time and disk"),
    "report": ("finetune_mile.verbs.report", "compare finished runs on one page"),
    "predict": ("finetune_mile.verbs.predict", "label new images: files, folders, or names on stdin"),
    "export": ("finetune_mile.verbs.export", "write a trained classifier for timm, transformers, ONNX or torch.export"),
    "weights": ("finetune_mile.verbs.weights", "checkpoints: ls, show, check, convert, add, verify"),
    "recipes": ("finetune_mile.verbs.recipes", "recipe files: ls, show, cp"),
    "eval": ("finetune_mile.verbs.evaluate", "score any classifier, or saved logits, on any data"),
    "pack": ("finetune_mile.verbs.pack", "write resized images into WebDataset shards"),
}
# Other names of verbs; for one version those that `check` has replaced.
OTHER_NAMES = {"train": "run", "evaluate": "eval"}
REPLACED = {"plan": "check", "preflight": "check", "doctor": "check"}

EPILOG = """
examples:
  finetune-mile run                                     the demo, about a minute
  finetune-mile quickstart photos                       photos/CLASS/IMAGE.jpg
  finetune-mile run --init moco.pth.tar --data folder:photos --fraction 0.1 --out runs/mine
  finetune-mile predict runs/mine new-photos/

finetune-mile VERB --help lists the flags of a verb; --version prints the version
"""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 fine, 1 the check or the run failed, 2 the command or its input was wrong."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write("usage: finetune-mile VERB ...\n\n")
        for verb, (_, does) in VERBS.items():
            sys.stdout.write(f"  {verb:<10} {does}\n")
        sys.stdout.write(EPILOG)
        return 0 if words else 2
    verb, *rest = words
    if verb == "--version":
        sys.stdout.write(f"finetune-mile {__version__}\n")
        return 0
    if verb in REPLACED:
        sys.stderr.write(f"note: `finetune-mile {verb}` is now `finetune-mile {REPLACED[verb]}`; use that name.\n")
    verb = (OTHER_NAMES | REPLACED).get(verb, verb)
    if verb not in VERBS:
        return tell(Problem(f"{verb}: unknown verb; {did_you_mean(verb, VERBS)}"))
    wait_quietly()
    try:
        code: int = importlib.import_module(VERBS[verb][0]).main(rest)
        sys.stdout.flush()
    except (Problem, OSError) as error:
        return told(error)
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
