"""The last step of a run, `--refit`: the same recipe once more, on all labels, those of the validation images included.

The scores stay those of the run before: no image is left that could test the new weights. Passes over the labelled
images stay the same, so there are more steps; how far the weights go from the first to the last ones is known.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from finetune_mile.checkpoints.exporting import CONFIG, write_export
from finetune_mile.core.files import whole_file
from finetune_mile.core.problems import Problem
from finetune_mile.images.splits import with_validation
from finetune_mile.pages.card import model_card
from finetune_mile.training.device import Device
from finetune_mile.training.features import on_features
from finetune_mile.training.folder import REFIT, RunFolder
from finetune_mile.training.steps import learner_of, open_inside, train_phases, with_labels
from finetune_mile.training.task import Model, Task


def refit(task: Task, model: Model, device: Device, folder: RunFolder) -> None:
    """Train on all labels, and export that in the place of the weights that were scored.

    Args:
        task: of the run, whose results are in the folder.
        model: as before the first step.
        device: where to compute.
        folder: of the run.
    """
    main = device.accelerator.is_main_process
    device.accelerator.wait_for_everyone()  # the first process has written the results that all read
    if task.pools.images.environment is not None:
        raise Problem("--refit: images that come from several environments cannot be joined with validation images")
    pools = with_validation(task.pools, task.data.val)
    labels, before = (len(each.indices["labelled"]) for each in (pools, task.pools))
    results = json.loads((folder.path / "results.json").read_text(encoding="utf-8"))
    steps = results.get("chosen_step", task.plan.total_steps) * labels / before
    again = with_labels(task, pools, max(round(steps), 1))
    again = dataclasses.replace(again, data=dataclasses.replace(task.data, train=pools.images))
    shown, place = on_features(again, model, device, scored=False)
    split = pools.to_json(task.recipe.fraction, task.recipe.seed) | {"val_ids": list(task.data.val.ids)}
    inside = open_inside(again, device, folder, REFIT, {"split.json": split})
    if main:
        sys.stderr.write(f"refit   {again.plan.total_steps:,} steps with {labels:,} labels\n")
    loop, _ = train_phases(shown, model, place, inside)
    learner = learner_of(loop, float(folder.info["share"]) if main else 1.0)
    if not main:
        return
    config = json.loads((folder.path / "export" / CONFIG).read_text(encoding="utf-8"))
    config |= {"refit_labels": labels, "steps": again.plan.total_steps}
    write_export(folder.path / "export", model.exported(learner), config)
    with whole_file(folder.path / "export/README.md") as part:
        part.write_text(model_card(config, results, "own"), encoding="utf-8")
    inside.prune(0)
    sys.stdout.write(
        f"Trained again on all {labels:,} labelled images (--refit): predict and export use these weights. The scores "
        "are of the run before, which had not seen the validation images.\n"
    )
