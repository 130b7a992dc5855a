"""Every mode of training, played one after another in the processes that are there: `modes.py FOLDER`.

Starting processes takes longer than the runs, so two are started once. A mode is a line of flags; `distill` has the run
of an earlier mode as its teacher.

Group norm and SGD at a small rate, so that the order of a sum is not blown up. A process that is alone computes a batch
in two accumulated parts, which are the sums that two processes make; and some modes also whole, into FOLDER/whole.
"""

import os
import sys
from pathlib import Path

from idx_files import write_mnist
from shortcuts import AUGMENTED, SHORT, SHORT_MILE

PLAIN = [
    "--data",
    "demo:120",
    "--arch",
    "resnet-demo-gn",
    "--lr",
    "0.01",
    "--steps",
    "24",
    "--set",
    "optimizer.name=sgd",
]
PLAIN += ["--set", "optimizer.warmup=0", "--set", "optimizer.schedule=constant"]
MILE = [*SHORT_MILE, *PLAIN]
OTHER = [*SHORT, *PLAIN, "--method"]
SOFT = ["--set", "mile.targets=soft"]
CYCLE = ["--set", "mile.pseudo_labels=cycle"]
TENTH = ["--fraction", "0.1", "--semi"]
TEACHER = "the run of the mode sigmoid"
HEAT = ["--set", "distill.loss=cross_entropy", "--set", "distill.temperature=2", "--set"]
SHARE = ["--set", "labelled_share=0.4"]

MODES = {
    "softmax": [*OTHER, "softmax"],
    "sigmoid": [*OTHER, "sigmoid"],
    "mile": MILE,
    "mile-soft": [*MILE, *SOFT],
    "mile-argmax": [*MILE, "--set", "mile.targets=argmax"],
    "mile-published": [*MILE, "--variant", "published"],
    "mile-cycle": [*MILE, *CYCLE],
    "mile-cycle-soft": [*MILE, *CYCLE, *SOFT],
    "mile-auto": [*MILE, "--rho", "auto"],
    "mile-auto-open": [*MILE, "--rho", "auto", "--set", "auto.gate=off"],
    "noisy-student": [*OTHER, "noisy-student"],
    "self-distill": [*OTHER, "self-distill"],
    "distill": [*OTHER, "distill", "--teacher", TEACHER],
    "distill-labels": [*OTHER, "distill", "--teacher", TEACHER, *TENTH, "all", *HEAT, "distill.label_weight=0.3"],
    "semi-all": [*MILE, *SOFT, *TENTH, "all"],
    "semi-unlabelled": [*MILE, *SOFT, *TENTH, "unlabelled"],
    "semi-share": [*MILE, *SOFT, *TENTH, "all", *SHARE, "--set", "mile.union=true"],
    "semi-share-cycle": [*MILE, *SOFT, *TENTH, "unlabelled", *SHARE, *CYCLE],
    "mile-augmented": [*MILE, *SOFT, *AUGMENTED],
    "unlabelled": [*MILE, *SOFT, "--semi", "unlabelled", "--unlabelled", "demo:60", "--set", "views=weak-strong"],
    "frozen": [*MILE, "--trunk", "frozen", "--set", "feature_dtype=float32"],
}

AVERAGED = ["averaged-teacher", *TENTH, "all", *SHARE, "--set", "optimizer.ema=0.9", "--set", "views=weak-strong"]
MODES |= {
    "averaged-teacher": [*OTHER, *AVERAGED],
    "wan": [*OTHER, "wan"],
    "large-loss": [*OTHER, "large-loss", "--set", "large_loss.share=0.2"],
    "role": [*OTHER, "role"],
}

THEN = "then={method: averaged-teacher, labelled_share: 0.4, views: weak-strong, optimizer: {ema: 0.9}, steps: 12}"
MODES |= {"two-stages": [*OTHER, "sigmoid", *TENTH, "all", "--set", THEN]}

RULES = ["--data", "demo:400", "--head-init", "probe", "--keep", "best", "--lr", "0.003"]
RULES += [
    "--set=batch_norm=frozen",
    "--set=channels_last=true",
    "--set=mile.union=true",
    "--set=optimizer.name=relative",
]
RULES += ["--set=optimizer.head_lr=null", "--set=optimizer.nesterov=false"]
MODES |= {"first-run": [*MILE, *RULES]}
MODES |= {"patience": [*MILE, "--patience", "1", "--set", "evaluate.phases=true"]}

DIGITS = "--data colored-mnist of digits that are drawn"
PENALTY = ["--recipe", "ood/colored-mnist", DIGITS, "--steps", "24", "--batch-size", "16", "--lr", "0.01"]
PENALTY += ["--set", "optimizer.name=sgd", "--set", "log_every=1", "--method"]
MODES |= {
    "irm": [*PENALTY, "irm", "--set", "irm.weight=5", "--set", "irm.anneal=8"],
    "rex": [*PENALTY, "rex", "--set", "rex.weight=5", "--set", "rex.anneal=8"],
}

UNDIVIDED = ("irm", "rex", "large-loss", "role")  # their loss is of the complete batch
WHOLE = ("sigmoid", "mile-soft", "semi-share-cycle", "mile-augmented")


def play(folder):
    from finetune_mile.run import main

    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    os.environ["FINETUNE_MILE_CACHE"] = str(folder / "cache")  # features of these processes
    digits = folder.parent / "digits"
    if not digits.is_dir():
        write_mnist(digits, 300, 60)
    data = ["--data", f"colored-mnist:{digits}?side=14"]
    runs = {}
    for mode, flags in MODES.items():
        parts = 1 + (alone and mode not in UNDIVIDED)
        given = [word for flag in flags for word in (data if flag == DIGITS else [flag])]
        runs[mode] = ([*given, "--set", f"accumulate={parts}"], folder / mode)
    if alone:
        runs |= {f"{mode}, whole": (MODES[mode], folder / "whole" / mode) for mode in WHOLE}
    for mode, (flags, out) in runs.items():
        found = [str(folder / "sigmoid") if flag == TEACHER else flag for flag in flags]
        if main([*found, "--out", str(out)]) != 0:
            sys.exit(f"{mode} failed")


if __name__ == "__main__":
    from accelerate import Accelerator

    from finetune_mile.training import finish

    Accelerator.end_training = lambda self: None  # it would part the processes after the first mode
    finish.write_report = lambda *anything: None  # half of the time of a run this small
    play(Path(sys.argv[1]))
