"""Every mode of training, played one after another in the processes that are there: `modes.py FOLDER`.

Starting processes takes longer than the runs, so two are started once. A mode is a line of flags; `distill` has the run
of an earlier mode as its teacher.

What is compared is whether the processes see the same samples and weights, so nothing may blow up the order of a sum:
group norm, SGD and a small rate. Hard labels turn a last bit of a sigmoid into a whole label: their thresholds lie where
no sigmoid of these runs is near, and the labels are counted.
"""

import sys
from pathlib import Path

from shortcuts import SHORT, SHORT_MILE

PLAIN = ["--data", "demo:120", "--arch", "resnet-demo-gn", "--lr", "0.01", "--steps", "12", "--set", "optimizer.name=sgd"]
PLAIN += ["--set", "optimizer.warmup=0", "--set", "optimizer.schedule=constant"]
MILE = [*SHORT_MILE, *PLAIN]
OTHER = [*SHORT, *PLAIN, "--method"]
SOFT = ["--set", "mile.targets=soft"]
CYCLE = ["--set", "mile.pseudo_labels=cycle"]
TENTH = ["--fraction", "0.1", "--semi"]
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
    "noisy-student": [*OTHER, "noisy-student"],
    "self-distill": [*OTHER, "self-distill"],
    "distill": [*OTHER, "distill", "--teacher", "sigmoid"],
    "semi-all": [*MILE, *SOFT, *TENTH, "all"],
    "semi-unlabelled": [*MILE, *SOFT, *TENTH, "unlabelled"],
    "semi-share": [*MILE, *SOFT, *TENTH, "all", *SHARE, "--set", "mile.union=true"],
    "semi-share-cycle": [*MILE, *SOFT, *TENTH, "unlabelled", *SHARE, *CYCLE, "--set", "accumulate=2"],
}

if __name__ == "__main__":
    from accelerate import Accelerator

    from finetune_mile import training
    from finetune_mile.run import main

    Accelerator.end_training = lambda self: None  # it would part the processes after the first mode
    training.write_report = lambda *anything: None  # half of the time of a run this small
    folder = Path(sys.argv[1])
    for mode, flags in MODES.items():
        at_home = [str(folder / flag) if flag == "sigmoid" and "distill" in flags else flag for flag in flags]
        if main([*at_home, "--out", str(folder / mode)]) != 0:
            sys.exit(f"{mode} failed")
