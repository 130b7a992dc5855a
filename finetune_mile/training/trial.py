"""The trial of `keep: best`: the same steps with fewer labels; those held out decide how far a run's weights go."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from torch import Tensor, nn

from finetune_mile.core.files import write_json
from finetune_mile.core.problems import Problem
from finetune_mile.images.splits import hold_out
from finetune_mile.learning.losses import bce_entries, given_matrix, shared
from finetune_mile.measures.intervals import clearly_above
from finetune_mile.training.device import Device
from finetune_mile.training.folder import TRIAL, RunFolder
from finetune_mile.training.plan import HELD_OUT, MOST_LABELS, has_trial, trial_steps
from finetune_mile.training.steps import learner_of, open_inside, train_phases, with_labels
from finetune_mile.training.task import Model, Task, on_training_images

SHARES = (1.0, 0.5)  # in the order of preference


def share_by_trial(task: Task, model: Model, device: Device, folder: RunFolder) -> float:
    """How far the weights of a run go from the first ones (0) to the last ones (1).

    All the way for `keep: last`, and with very many labels. Otherwise a trial decides: a run that holds a fifth of the
    labels out, in a folder of its own inside the run's, where a stopped one is continued. It takes the first of SHARES
    that these labels do not reject. Few labels cannot judge: half the way.
    """
    if task.recipe.keep == "last":
        return 1.0
    decided, labelled = folder.path / TRIAL / "decision.json", len(task.pools.indices["labelled"])
    if decided.is_file():
        return float(json.loads(decided.read_text(encoding="utf-8"))["share"])
    if not has_trial(task.recipe, labelled):
        return 1.0 if labelled > MOST_LABELS else 0.5
    try:
        pools = hold_out(task.pools, HELD_OUT, task.recipe.seed)
    except Problem:  # one image a class
        return 0.5
    trial = with_labels(task, pools, trial_steps(task.plan.total_steps, len(pools.indices["labelled"]) / labelled))
    inside, main = open_inside(trial, device, folder, TRIAL), device.accelerator.is_main_process
    if main:
        sys.stderr.write(
            f"trial   {trial.plan.total_steps:,} steps with {len(pools.calibration):,} labels held out, "
            "which decide how far the weights go; then the run with all labels\n"
        )
    loop, _ = train_phases(trial, model.copied(), device, inside, after=task.plan.total_steps)
    losses = {each: held_out_losses(trial, device, learner_of(loop, each)) for each in (*SHARES, 0.0)}
    share, means = not_rejected(losses), {f"{each:g}": float(some.mean()) for each, some in losses.items()}
    if main:
        write_json(decided, {"share": share, "held_out": len(pools.calibration), "losses": means})
        inside.prune(0)  # as large as those of the run, and of no more use
    device.accelerator.free_memory()
    return share


def not_rejected(losses: Mapping[float, Tensor]) -> float:
    """The first of SHARES whose losses (n,) are not clearly above those of the first weights; 0 if there is none."""
    return next((share for share in SHARES if not clearly_above(losses[share], losses[0.0])), 0.0)


def held_out_losses(trial: Task, device: Device, network: nn.Module) -> Tensor:
    """The loss (n,) of each held-out image.

    One given label: minus the log share of its probability among those of all classes, so that more labels cost
    nothing. A set of given labels says which labels are wrong, too: the loss that the activation is trained with.
    """
    logits, given = on_training_images(trial, device, network, trial.pools.calibration)
    if given.ndim == 2:
        targets = given_matrix(given, trial.num_classes)
        if trial.recipe.activation == "sigmoid":
            return bce_entries(logits, targets).sum(1)
        return -(shared(targets) * logits.log_softmax(1)).sum(1)
    probabilities = trial.probabilities(logits.double())
    shares = probabilities / probabilities.sum(1, keepdim=True).clamp(min=1e-30)
    return -shares.gather(1, given.unsqueeze(1)).squeeze(1).clamp(min=1e-30).log()
