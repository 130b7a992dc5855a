"""fastai and LightlyTrain on the photos, labels, first weights and passes of our own runs: docs/benchmarks.md.

python -m venv PEERS && PEERS/bin/pip install fastai lightly-train
python benchmarks/peers/beside_us.py --python PEERS/bin/python --init imgsim=model.pth \
    --data clothing=folder:CLOTHING --data 'grocery=folder:GROCERY?val=test&depth=2' --data cifar10=folder:CIFAR

Both tools run with their own defaults at our size and batch. Each gets the steps of our final run, and in a second run
those of our trial and final run together. A result is one line of --record and is not run again; `--table` only prints.
The checkpoint must be a ResNet of torchvision's names, such as resnet50.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    Features = Callable[[Tensor], Tensor]  # or logits: images (B, 3, H, W) to (B, D)
    Trained = tuple[Features, float, dict[str, Any]]  # logits, accuracy by the tool's own pipeline, further facts

BENCHMARKS = Path(__file__).resolve().parent.parent
SHORT = "LightlyTrain-warmup10"  # its learning rate rises for a tenth of the steps; by default for all of so few
MODULES = {"fastai": "fastai.vision.all", "LightlyTrain": "lightly_train", SHORT: "lightly_train"}
BUDGETS = ("once", "twice")  # the steps of our final run; those of our trial and final run
OURS = ("sigmoid", "mile")
MEASURES = {"accuracy": "own views", "on_our_views": "our views"}  # how a peer sees the validation photos
SAME = 1e-3  # the largest difference between features of equal weights, as a share of their largest value

# ------------------------------------------------------------------------------------ in our environment


def prepare(folder: Path, init: str, data: str, fraction: float, seed: int, options: argparse.Namespace) -> Any:
    """Write the photos, the weights and our validation views where any tool can read them.

    Returns:
        The job of a peer, without its name and steps, and the steps of our final run and of trial and final run.
    """
    import torch

    import finetune_mile
    from finetune_mile.images.pipeline import centre_view, normalise
    from finetune_mile.images.sources import load_data
    from finetune_mile.images.splits import fingerprint, hold_out, labelled_pools
    from finetune_mile.training.plan import FEW_LABELS, HELD_OUT, LEAST_STEPS, MOST_LABELS, auto_epochs, trial_steps

    images = load_data(data)
    pools = labelled_pools(images, fraction=fraction, seed=seed)
    labelled = pools.indices["labelled"]
    total = max(round(auto_epochs(len(labelled)) * len(labelled) / options.batch_size), LEAST_STEPS)
    trial = 0
    if FEW_LABELS <= len(labelled) <= MOST_LABELS:
        kept = len(hold_out(pools, HELD_OUT, seed).indices["labelled"])
        trial = trial_steps(total, kept / len(labelled))
    network = finetune_mile.load(init)
    card: Any = network.card
    convention = card.preprocess.model_copy(update={"size": options.size})
    job = {
        "folder": str(folder), "arch": card.arch, "size": options.size, "batch_size": options.batch_size, "seed": seed,
        "mean": convention.mean, "std": convention.std, "classes": len(images.classes), "labelled": len(labelled),
        "split": fingerprint([images.train.ids[i] for i in labelled]), "threads": options.threads,
    }  # fmt: skip
    if not (folder / "views.pt").is_file():
        for name, half, rows in (("train", images.train, labelled), ("val", images.val, range(len(images.val)))):
            for row in map(int, rows):
                photo = folder / name / f"{int(half.given[row]):04d}" / f"{row:07d}{Path(half.ids[row]).suffix}"
                photo.parent.mkdir(parents=True, exist_ok=True)
                content = half.content(row)
                assert isinstance(content, bytes)
                photo.write_bytes(content)
        views = torch.stack([centre_view(images.val.read(i), convention) for i in range(len(images.val))])
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (convention.mean, convention.std))
        with torch.inference_mode():
            features = network(normalise(views[:64], mean, std)).clone()
        torch.save(network.state_dict(), folder / "weights.pt")
        torch.save({"views": views, "given": images.val.given, "features": features}, folder / "views.pt")
    return job, (total, total + trial)


def run_peers(options: argparse.Namespace) -> None:
    """Train every peer on every cell that has no result yet, the first seed of all data first."""
    from own_photos import recorded

    missing = {}
    for peer in options.peers:
        module = MODULES[peer]
        words = [str(options.python), "-c", f"import {module}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            missing[peer] = (done.stderr.strip() or "no message").splitlines()[-1]
            print(f"{peer}: skipped, {options.python} cannot import {module}: {missing[peer]}", flush=True)
    peers = [peer for peer in options.peers if peer not in missing]
    for seed in range(options.seeds):
        for init in options.init:
            for data in options.data:
                folder = options.out / f"{init[0]}-{data[0]}-{options.fraction}-{seed}"
                known = recorded(options.record)
                if all(f"{folder.name}-{peer}-{budget}" in known for peer in peers for budget in options.budgets):
                    continue
                job, budgets = prepare(folder, init[1], data[1], float(options.fraction), seed, options)
                for budget in options.budgets:
                    steps = budgets[BUDGETS.index(budget)]
                    for peer in peers:
                        out = folder / f"{peer}-{budget}.json"
                        cell = f"{folder.name}-{peer}-{budget}"
                        if cell in known:
                            continue
                        print(time.strftime("%H:%M:%S"), folder.name, peer, steps, "steps", flush=True)
                        work = json.dumps({**job, "peer": peer, "steps": steps, "out": str(out)})
                        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
                        environment.pop("PYTHONPATH", None)
                        words = [str(options.python), __file__, "--job", work]
                        if subprocess.run(words, env=environment, check=False).returncode:
                            print(f"{folder.name} {peer}: failed, see above", flush=True)
                        else:
                            line = json.dumps({"cell": cell, **json.loads(out.read_text())})
                            print("  ", line, flush=True)
                            with options.record.open("a") as file:
                                file.write(line + "\n")


def ours(run: dict[str, Any], results_of: dict[str, dict[str, Any]]) -> float:
    """The accuracy of one of our runs; it must have had the labels, steps and validation images of the peers.

    Args:
        run: what `own_photos.py` recorded of it.
        results_of: the result of some peer for each budget that was run.
    """
    for budget, peer in results_of.items():
        taken = run["steps"][0] if budget == "once" else sum(run["steps"])
        mine = {"labels": run["split"], "steps": taken, "images": run["images"]}
        theirs = {"labels": peer["split"], "steps": peer["steps"], "images": peer["images"]}
        if mine != theirs:
            sys.exit(f"{run['cell']}: {mine}, but the peers had {theirs}; remove the lines of this cell")
    return float(run["accuracy"])


def table(options: argparse.Namespace) -> Iterator[str]:
    """One row per data set and seed, then means and paired differences, with the peers' own and with our views."""
    from own_photos import interval, recorded

    theirs, mine = recorded(options.record), recorded(options.runs)
    peers = [f"{peer}-{budget}" for peer in options.peers for budget in options.budgets]
    columns = [*OURS, *(name for name in peers if any(cell.endswith(f"-{name}") for cell in theirs))]
    yield f"| photos | seed | labels | steps | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 4)}\n"
    cells: dict[str, list[dict[str, dict[str, float]]]] = {}
    for init in options.init:
        for data in options.data:
            for seed in range(options.seeds):
                name = f"{init[0]}-{data[0]}-{options.fraction}"
                start = f"{name}-{seed}-"
                results = {cell.removeprefix(start): each for cell, each in theirs.items() if cell.startswith(start)}
                first = {b: next((r for key, r in results.items() if key.endswith(b)), None) for b in options.budgets}
                measured = {budget: result for budget, result in first.items() if result is not None}
                if not measured:
                    continue
                for method in OURS:
                    if (run := mine.get(f"{name}-{method}-{seed}")) is not None:
                        results[method] = dict.fromkeys(MEASURES, ours(run, measured))
                cells.setdefault(data[0], []).append(results)
                row = {key: each["accuracy"] for key, each in results.items()}
                steps = ", ".join(str(result["steps"]) for result in measured.values())
                labelled = next(iter(measured.values()))["labelled"]
                yield f"| {data[0]} | {seed} | {labelled} | {steps} | {line(row, columns, '{:.1f}')} |\n"
    for title, some in (*cells.items(), ("all", [cell for each in cells.values() for cell in each])):
        complete = [cell for cell in some if set(columns) <= set(cell)]
        for measure, words in MEASURES.items() if complete else ():
            means = {key: statistics.fmean(cell[key][measure] for cell in complete) for key in columns}
            less = {key: interval([cell["mile"][measure] - cell[key][measure] for cell in complete]) for key in columns}
            yield f"| **{title}**, {words} | mean of {len(complete)} | | | {line(means, columns, '{:.1f}')} |\n"
            yield f"| mile minus this | | | | {line(less, columns, '{}')} |\n"


def line(row: dict[str, Any], columns: list[str], form: str) -> str:
    """The cells of a row; a dash where there is no value."""
    return " | ".join("-" if row.get(key) is None else form.format(row[key]) for key in columns)


# ------------------------------------------------------------------------------------ in the peers' environment


def run_job(job: dict[str, Any]) -> None:
    """Train one peer and write its result."""
    import torch

    torch.set_num_threads(job["threads"])
    folder = Path(job["folder"])
    saved = torch.load(folder / "views.pt")
    mean, std = (torch.tensor(job[key]).view(3, 1, 1) for key in ("mean", "std"))
    views = (saved["views"].float() / 255 - mean) / std
    differences: list[float] = []

    def check(features: Features) -> None:
        """Refuse a network that is not the checkpoint: its features of 64 images must be ours."""
        with torch.inference_mode():
            theirs = features(views[:64]).flatten(1)
        differences.append(float((theirs - saved["features"]).abs().max() / saved["features"].abs().max()))
        if differences[-1] > SAME:
            sys.exit(
                f"{job['peer']}: the weights are not loaded: features differ by {differences[-1]:.2g} of their size"
            )

    began = time.monotonic()
    logits, own, facts = (fastai if job["peer"] == "fastai" else lightly_train)(job, folder, check)
    with torch.inference_mode():
        guesses = torch.cat([logits(some).argmax(1) for some in views.split(64)])
    result = {
        "accuracy": own, "on_our_views": 100 * float((guesses == saved["given"]).float().mean()),
        "feature_difference": differences[0], "steps": job["steps"], "labelled": job["labelled"], "split": job["split"],
        "images": len(views), "seconds": round(time.monotonic() - began),
        "version": version(MODULES[job["peer"]].split(".")[0]), **facts,
    }  # fmt: skip
    Path(job["out"]).write_text(json.dumps(result, indent=1) + "\n")


def fastai(job: dict[str, Any], folder: Path, check: Callable[[Features], None]) -> Trained:
    """`vision_learner` and `fine_tune` with a torchvision network that has our weights."""
    import torch
    import torchvision
    from fastai.vision import all as vision
    from fastai.vision.learner import model_meta

    def arch(**_: object) -> Any:
        network = getattr(torchvision.models, job["arch"])(weights=None)
        lost = network.load_state_dict(torch.load(folder / "weights.pt"), strict=False)
        assert lost.missing_keys == ["fc.weight", "fc.bias"]
        assert not lost.unexpected_keys
        return network

    class NoValidation(vision.Callback):  # type: ignore[misc]
        """The photos are scored once, at the end."""

        def before_validate(self) -> None:
            raise vision.CancelValidException

    model_meta[arch] = model_meta[getattr(vision, job["arch"])]
    vision.set_seed(job["seed"], reproducible=True)
    loaders = vision.ImageDataLoaders.from_folder(
        folder, train="train", valid="val", bs=job["batch_size"], num_workers=0, item_tfms=vision.Resize(job["size"]),
        batch_tfms=[*vision.aug_transforms(), vision.Normalize.from_stats(job["mean"], job["std"])],
    )  # fmt: skip
    learner = vision.vision_learner(loaders, arch)
    body = learner.model[0].eval()
    check(lambda images: body(images).mean((2, 3)))
    passes = math.ceil(job["steps"] / len(loaders.train))  # the last, incomplete batch of a pass is left out
    with learner.no_bar(), learner.no_logging():
        learner.fine_tune(passes - 1, cbs=NoValidation())  # and one pass with the body frozen
        probabilities, given = learner.get_preds(dl=loaders.valid)
    own = 100 * float((probabilities.argmax(1) == given).float().mean())
    return learner.model.eval(), own, {"trained_steps": passes * len(loaders.train)}


def lightly_train(job: dict[str, Any], folder: Path, check: Callable[[Features], None]) -> Trained:
    """`train_image_classification` with our weights as `backbone_weights`."""
    import lightly_train as tool
    from lightly_train._task_models.image_classification.task_model import ImageClassification
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    load = ImageClassification.load_backbone_weights

    def load_and_check(model: Any, path: str) -> None:
        load(model, path)
        backbone = model.backbone.eval()
        check(lambda images: backbone.forward_pool(backbone.forward_features(images))["pooled_features"])

    ImageClassification.load_backbone_weights = load_and_check
    out = Path(job["out"]).with_suffix("")
    tool.train_image_classification(
        out=out, overwrite=True, model=f"torchvision/{job['arch']}", steps=job["steps"], batch_size=job["batch_size"],
        seed=job["seed"], num_workers=0, accelerator="cpu", save_checkpoint_args={"save_best": False},
        model_args={"backbone_weights": str(folder / "weights.pt"),
                    **({"lr_warmup_steps": job["steps"] // 10} if job["peer"] == SHORT else {})},
        data={"train": str(folder / "train"), "val": str(folder / "val"),
              "classes": {number: f"{number:04d}" for number in range(job["classes"])}},
        transform_args={"image_size": (job["size"],) * 2, "normalize": {"mean": job["mean"], "std": job["std"]}},
    )  # fmt: skip
    events = EventAccumulator(str(out)).Reload()
    own = 100 * events.Scalars("val_metric/top1_acc_micro")[-1].value
    model = tool.load_model(out / "exported_models/exported_last.pt").eval()
    for part in ("checkpoints", "exported_models"):  # 450 MB
        shutil.rmtree(out / part)
    return model.forward_backend, own, {"trained_steps": job["steps"]}


def main() -> None:
    """Run the missing runs, then print the table."""
    if sys.argv[1:2] == ["--job"]:
        return run_job(json.loads(sys.argv[2]))
    sys.path.insert(0, str(BENCHMARKS))
    from own_photos import pair

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="of the peers' environment")
    parser.add_argument("--init", action="append", type=pair, required=True)
    parser.add_argument("--data", action="append", type=pair, required=True)
    parser.add_argument("--peers", nargs="+", choices=MODULES, default=["fastai", "LightlyTrain"])
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=BUDGETS)
    parser.add_argument("--fraction", default="0.1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    records = BENCHMARKS / "records"
    parser.add_argument("--runs", type=Path, default=records / "own_photos.jsonl", help="our runs, by own_photos.py")
    parser.add_argument("--record", type=Path, default=records / "peers.jsonl", help="the peers' results")
    parser.add_argument("--out", type=Path, default=BENCHMARKS.parent / "runs/peers", help="photos, weights, logs")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    options.out = options.out.resolve()
    if not options.table:
        run_peers(options)
    print("".join(table(options)))


if __name__ == "__main__":
    main()
