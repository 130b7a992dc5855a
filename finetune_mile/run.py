"""START HERE. Flags to recipe; recipe to data, network and phases; phases to a run folder. Reads top to bottom."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # As a script inside the package Python puts finetune_mile/ first on the path; the repository's root is meant.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
from functools import partial

from finetune_mile.checkpoints.cards import fetch_card, find_card
from finetune_mile.checkpoints.init import Init, parse_init, parse_source
from finetune_mile.config.flags import given_settings, parse
from finetune_mile.config.resolve import Resolved, check, resolve
from finetune_mile.core.problems import Problem, tell
from finetune_mile.images.sources import check_split, check_truth, load_data, split_name
from finetune_mile.training.folder import check_free, next_folder, resumed_recipe
from finetune_mile.training.plan import make_plan


def main(argv: list[str] | None = None) -> int:
    """The command: 0 fine, 1 the run failed, 2 the command or its input was wrong, 128 + n stopped by a signal."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        if options.json:
            return print_settings(options)
        return run(options, *prepare(options))
    except Problem as problem:
        return tell(problem)


def print_settings(options: argparse.Namespace) -> int:
    """`--explain --json`: the resolved recipe, without data, weights or torch."""
    from finetune_mile.training.explain import settings_json

    if not options.explain:
        raise Problem("--json belongs to --explain: add --explain, or leave --json out")
    sys.stdout.write(settings_json(resolve_options(options)) + "\n")
    return 0


def resolve_options(options: argparse.Namespace) -> Resolved:
    """The recipe of a new run, or the one that a resumed run began with."""
    if options.resume is None:
        return resolve(given_settings(options), options.sets)
    path, tree = resumed_recipe(options.resume)
    return check(tree, {}, [], path, "--resume")


def prepare(options: argparse.Namespace) -> tuple[Resolved, Path, Init, Init | None]:
    """All that can be checked before torch is imported: recipe, run folder (not written yet), --init, --teacher."""
    resolved = resolve_options(options)
    recipe = resolved.recipe
    init = parse_init(recipe.init)
    teacher = None if recipe.teacher is None else parse_source(recipe.teacher, "--teacher")
    if options.resume is not None:
        return resolved, options.resume, init, teacher
    split_name(recipe.data)
    if recipe.split is not None:
        check_split(recipe.split)
    if recipe.truth is not None:
        check_truth(recipe.truth)
    path = options.out or next_folder(Path("runs"), resolved.path.stem)
    check_free(path, options.overwrite)
    if init.kind == "card":
        fetch_card(find_card(init.name))  # a missing network is told before the images are listed
    return resolved, path, init, teacher


def run(options: argparse.Namespace, resolved: Resolved, path: Path, init: Init, teacher_init: Init | None) -> int:
    """The run itself; from here on torch is needed."""
    from finetune_mile.checkpoints.classifier import load_teacher
    from finetune_mile.checkpoints.loading import load_network
    from finetune_mile.images.index import BadImages
    from finetune_mile.images.splits import labelled_pools
    from finetune_mile.images.truth import with_truth
    from finetune_mile.training import devices
    from finetune_mile.training.explain import explain
    from finetune_mile.training.monitor import Signals, stop_together
    from finetune_mile.training.session import Session
    from finetune_mile.training.train import open_folder, play

    recipe = resolved.recipe
    precision = devices.wanted_precision(recipe.precision)
    accelerator = devices.start(precision=precision, seed=recipe.seed, track=recipe.track, project=str(path))
    parts = accelerator.num_processes * recipe.accumulate
    if recipe.batch_size % parts:
        raise Problem(f"--batch-size {recipe.batch_size} must be a multiple of processes x accumulate = {parts}")
    data = load_data(recipe.data)
    if recipe.truth is not None:
        data = with_truth(data, recipe.truth)
    if "environments" in recipe.playing.needs and data.train.environment is None:
        raise Problem(f"--method {recipe.method} needs images from several environments, such as colored-mnist:DIR; "
                      f"--data {recipe.data} has none")  # fmt: skip
    pools = labelled_pools(
        data, fraction=recipe.fraction, seed=recipe.seed, split=recipe.split, calibration=recipe.calibration
    )
    plan = make_plan(
        recipe, labelled=len(pools.indices["labelled"]),
        pool_sizes={name: len(members) for name, members in pools.indices.items()},
    )  # fmt: skip
    network, card, report = load_network(
        init,
        arch=recipe.arch,
        num_classes=len(data.classes),
        head_bias=recipe.head_bias,
        head_weight=recipe.head_weight,
        keep_head=recipe.keep_head,
        head_from=recipe.head_from,
    )
    own = {"size": recipe.size, "crop": recipe.crop, "mean": recipe.mean, "std": recipe.std}
    how = card.preprocess.model_copy(update={key: value for key, value in own.items() if value is not None})
    teacher = None if teacher_init is None else load_teacher(teacher_init, classes=data.classes, seen=how)
    recipe = recipe.model_copy(update={"steps": plan.total_steps, "epochs": None, "precision": precision})
    with Signals() as signals:
        session = Session(
            recipe=recipe, accelerator=accelerator, data=data, pools=pools, card=card, how=how,
            bad=BadImages(path / "bad_images.csv", recipe.data),
            tick=signals.raise_if_caught if accelerator.num_processes == 1 else lambda: None,
            stop=partial(stop_together, accelerator, signals, 0),
        )  # fmt: skip
        if accelerator.is_main_process:
            explain(resolved, session, plan, report, full=options.explain)
        if options.explain:
            return 0
        folder = open_folder(session, path, report, resume=options.resume is not None, overwrite=options.overwrite)
        return play(session, plan, network, teacher, folder, signals)


if __name__ == "__main__":
    sys.exit(main())
