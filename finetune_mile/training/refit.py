"""The last step of a run, `--refit`: the same recipe once more, on all labels, those of the validation images included.

The scores stay those of the run before: no image is left that could test the new weights. Passes over the labelled
images stay the same, so there are more steps; how far the weights go from the first to the last ones is known.
"""

from __future__ import annotations

import dataclasses
import json

from torch import nn

from finetune_mile.checkpoints.exporting import CONFIG, write_export
from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.files import whole_file, write_json
from finetune_mile.core.problems import Problem
from finetune_mile.images.splits import with_validation
from finetune_mile.pages.card import model_card
from finetune_mile.training.device import Device
from finetune_mile.training.folder import REFIT, RunFolder
from finetune_mile.training.plan import make_plan
from finetune_mile.training.task import Model, Task


def on_all_labels(task: Task, folder: RunFolder) -> Task:
    """The same task on all labels; the folder has the results of the run before."""
    if task.pools.images.environment is not None:
        raise Problem("--refit: images that come from several environments cannot be joined with validation images")
    before, pools = task.pools, with_validation(task.pools, task.data.val)
    results = json.loads((folder.path / "results.json").read_text(encoding="utf-8"))
    sizes = {name: len(members) for name, members in pools.indices.items()}
    steps = results.get("chosen_step", task.plan.total_steps) * sizes["labelled"] / len(before.indices["labelled"])
    evaluate = task.recipe.evaluate.model_copy(update={"images": 0})
    recipe = task.recipe.model_copy(
        update={"steps": max(round(steps), 1), "evaluate": evaluate, "track": "none", "patience": None}
    )
    data = dataclasses.replace(task.data, train=pools.images)
    plan = make_plan(recipe, sizes)
    return dataclasses.replace(task, recipe=recipe, data=data, pools=pools, plan=plan)


def open_refit(task: Task, device: Device, folder: RunFolder) -> RunFolder:
    """The folder of the new run, inside that of the run before; made by the first process, or continued."""
    path = folder.path / REFIT
    if device.accelerator.is_main_process and not (path / "recipe.yaml").is_file():
        RunFolder.create(path, to_yaml(task.recipe), overwrite=False)
        split = task.pools.to_json(task.recipe.fraction, task.recipe.seed)
        write_json(path / "split.json", split | {"val_ids": list(task.data.val.ids)})
    device.accelerator.wait_for_everyone()
    return RunFolder.reopen(path)


def replace_export(task: Task, model: Model, learner: nn.Module, folder: RunFolder, refitted: RunFolder) -> str:
    """Put the new weights in the place of those that were scored; returns what to say about it."""
    config = json.loads((folder.path / "export" / CONFIG).read_text(encoding="utf-8"))
    results = json.loads((folder.path / "results.json").read_text(encoding="utf-8"))
    labels = len(task.pools.indices["labelled"])
    config |= {"refit_labels": labels, "steps": task.plan.total_steps}
    write_export(folder.path / "export", model.exported(learner), config)
    with whole_file(folder.path / "export/README.md") as part:
        part.write_text(model_card(config, results, "own"), encoding="utf-8")
    refitted.prune(0)
    return (
        f"Trained again on all {labels:,} labelled images (--refit): predict and export use these weights. The scores "
        "are of the run before, which had not seen the validation images."
    )
