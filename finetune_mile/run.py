"""START HERE. Flags to recipe; recipe to data, network and phases; phases to a run folder. Reads top to bottom."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports: an end without a traceback

if __name__ == "__main__" and not __package__:
    # As a script inside the package Python puts finetune_mile/ first on the path; the repository's root is meant.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import importlib.util
import os
from dataclasses import replace

from finetune_mile.checkpoints.cards import fetch_card, find_card
from finetune_mile.checkpoints.init import Init, parse_init, parse_source
from finetune_mile.config.flags import RunOptions, parse
from finetune_mile.config.resolve import Resolved, resolve, resolve_tree
from finetune_mile.config.schema import FullRecipe
from finetune_mile.core.cores import wait_quietly
from finetune_mile.core.files import is_finished, told
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import check_split, check_truth, split_name
from finetune_mile.training import folder as folders
from finetune_mile.training.folder import choose_folder, next_folder, resumed_recipe, say_finished
from finetune_mile.training.minutes import run_minutes

MOST_SEEDS = 100


def main(argv: list[str] | None = None) -> int:
    """The command: 0 fine, 1 the run failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    wait_quietly()
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        if options.json:
            return print_settings(options)
        if options.minutes is not None:
            return run_minutes(options, prepare)
        if options.seeds is not None:
            return run_seeds(options, options.seeds)
        return run(*prepare(options))
    except (Problem, OSError) as error:
        return told(error)
    except KeyboardInterrupt:
        return 130


def run_seeds(options: RunOptions, seeds: int) -> int:
    """`--seeds N`: one run per seed, in folders seed-0, ... of --out, then mean and spread. Again, it continues."""
    from finetune_mile.training.seeds import summarise, taken_up

    if not 1 <= seeds <= MOST_SEEDS:
        raise Problem(f"--seeds {seeds}: must be from 1 to {MOST_SEEDS}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Problem("--seeds runs in one process; with several, start one run per seed: --seed N --out DIR/seed-N")
    if "seed" in options.settings or options.resume is not None or options.explain or options.overwrite:
        raise Problem("--seeds chooses the seeds and continues by itself: leave out --seed, --resume, --explain and "
                      "--overwrite")  # fmt: skip
    resolved = resolve_options(options)
    path = options.out or next_folder(Path("runs"), f"{resolved.path.stem}-seeds")
    taken_up(path, resolved.recipe)
    again = RunOptions(keep_checkpoints=options.keep_checkpoints, refit=options.refit)
    for seed in range(seeds):
        folder = path / f"seed-{seed}"
        if is_finished(folder) and not folders.refit_is_left(folder, options.refit):
            continue
        if (folder / "recipe.yaml").is_file():
            one = replace(again, resume=folder)
        else:
            one = replace(options, settings={**options.settings, "seed": seed}, out=folder)
        if code := run(*prepare(one)):
            return code
    summarise(path, [path / f"seed-{seed}" for seed in range(seeds)])
    return 0


def print_settings(options: RunOptions) -> int:
    """`--explain --json`: the resolved recipe, without data, weights or torch."""
    from finetune_mile.training.explain import settings_json

    if not options.explain:
        raise Problem("--json belongs to --explain: add --explain, or leave --json out")
    sys.stdout.write(settings_json(resolve_options(options)) + "\n")
    return 0


def resolve_options(options: RunOptions) -> Resolved:
    """The recipe of a new run, or the one that a resumed run began with."""
    if isinstance(options.resume, Path):
        return resumed_settings(options.resume)
    return resolve(options.given, options.sets)


def resumed_settings(folder: Path) -> Resolved:
    path, tree = resumed_recipe(folder)
    return resolve_tree(FullRecipe, tree, path, "--resume")


def prepare(options: RunOptions) -> tuple[RunOptions, Resolved, Path, Init, Init | None]:
    """All that can be checked before torch is imported: recipe, run folder (not written yet), --init, --teacher.

    Several processes import it here, to agree on the folder. In the returned options `resume` is a folder or None.
    """
    resolved = resolve_options(options)
    recipe = resolved.recipe
    init = parse_init(recipe.init)
    teacher = None if recipe.teacher is None else parse_source(recipe.teacher, "--teacher")
    split_name(recipe.data)
    if isinstance(options.resume, Path):
        return options, resolved, options.resume, init, teacher
    if recipe.track != "none" and importlib.util.find_spec(recipe.track) is None:
        raise Problem(f"--track {recipe.track}: the package is missing; pip install {recipe.track}")
    if recipe.unlabelled is not None:
        split_name(recipe.unlabelled, "--unlabelled")
    if recipe.split is not None:
        check_split(recipe.split)
    if recipe.truth is not None:
        check_truth(recipe.truth)
    path, begun = choose_folder(options, resolved.path.stem, recipe)
    if begun:
        return replace(options, resume=path), resumed_settings(path), path, init, teacher
    if init.kind == "card":
        fetch_card(find_card(init.name))  # a missing network is told before the images are listed
    return replace(options, resume=None), resolved, path, init, teacher


def run(options: RunOptions, resolved: Resolved, path: Path, init: Init, teacher_init: Init | None) -> int:
    """The run itself; from here on torch is needed."""
    done = options.resume is not None and is_finished(path) and not folders.refit_is_left(path, options.refit)
    if done and not options.explain:
        return say_finished(path)
    parent = os.getppid()
    from finetune_mile.training.explain import explain
    from finetune_mile.training.processes import Signals
    from finetune_mile.training.task import set_up
    from finetune_mile.training.train import open_folder, train

    with Signals(parent) as signals:
        task, model, device = set_up(resolved.recipe, init, teacher_init, path, signals)
        if device.accelerator.is_main_process:
            explain(resolved, task, model, device, full=options.explain)
        if options.explain:
            return 0
        folder = open_folder(task, model, device, path, resume=options.resume is not None, overwrite=options.overwrite)
        switches = {name: True for name in ("keep_checkpoints", folders.REFIT) if getattr(options, name)}
        if switches:  # also for a later --resume
            folder.info.update(switches)
            if device.accelerator.is_main_process:
                folder.update()
        return train(task, model, device, folder)[0]


if __name__ == "__main__":
    sys.exit(main())
