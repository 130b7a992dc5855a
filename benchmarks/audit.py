"""Does `audit` find wrong labels? The tables of docs/audit.md.

finetune-mile embed --init model.pth --data folder:CLOTHING --size 64 features/clothing
pip install --no-deps --target DIR cleanlab
python benchmarks/audit.py --features clothing=features/clothing --cleanlab DIR --logistic
python benchmarks/audit.py --doubted features/cifar --people DIR_OF_CIFAR10H --cleanlab DIR
python benchmarks/audit.py --loop CLOTHING --init model.pth --out loop
python benchmarks/audit.py --sets "mosaic:CLOTHING?train=1200&val=300=features/mosaic"

For each data set, kind of error, rate and seed: some labels are changed, all photos are judged, and the rankings are
compared by average precision. Errors are `symmetric` (any other class) or `confusable` (the class that a classifier of
the others mixes up with it most often). `cleanlab` ranks by its label quality on the same held-out probabilities
(those before our second pass), and, with --logistic, on those of scikit-learn's logistic regression (5 folds, on the
same standardised features). Then perfect ticks on the first 15 % of the photos of our list, and a new classifier: how
much of the gap to clean labels closes, on photos that were never changed. Every cell is a line of the record, and is
not run again. The score and its constants were chosen on seeds 10 to 12; the tables are of seeds 0 to 2.

--doubted: photos of CIFAR-10H that people do not agree on, first by the same rankings. --sets: photos whose true set of
labels is known get one label of it, and the list of missing labels is compared with the others.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from finetune_mile.compute.passes import Outputs
from finetune_mile.compute.rows import DONE, SPLITS, Store
from finetune_mile.config.resolve import resolve
from finetune_mile.images.sources import load_data
from finetune_mile.learning.losses import given_matrix
from finetune_mile.learning.ridge import STRENGTHS, LeftOut
from finetune_mile.measures.audit import errors_left, held_out_loss, judge_labels, judge_one
from finetune_mile.training.cleaning import TICKED
from finetune_mile.training.findings import Photos, find_all

RECORD = Path(__file__).resolve().parent / "records/audit.jsonl"
RATES, KINDS = (0.1, 0.2, 0.05), ("symmetric", "confusable")
TICKED_SHARE, TEST = 0.15, 0.25  # shares of the photos
FEW = 8  # photos of a class; smaller classes are left out


def read(place: Path, photos: int, seed: int) -> tuple[Tensor, Tensor, list[str]]:
    """Features (n, D), labels (n,) and ids of some photos of a store."""
    store, rows, names, ids = Store(place), [], [], []
    for split in SPLITS:
        done = store.state(split) == DONE
        if len(done):
            rows.append(store.rows(split).rows[torch.from_numpy(done)])
            table = pq.read_table(place / f"{split}.parquet")
            names += [labels[0] for labels, good in zip(table["labels"].to_pylist(), done, strict=True) if good]
            ids += [name for name, good in zip(table["id"].to_pylist(), done, strict=True) if good]
    features, words = torch.cat(rows), np.array(names)
    drawn = np.random.default_rng(seed).permutation(len(words))[:photos]
    kept = np.unique(words[drawn], return_counts=True)
    drawn = drawn[np.isin(words[drawn], kept[0][kept[1] >= FEW])]
    labels = torch.from_numpy(np.unique(words[drawn], return_inverse=True)[1])
    return features[drawn], labels, [ids[row] for row in drawn]


def best_scores(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, float]:
    """Leave-one-out scores at the strength with the least loss."""
    targets = given_matrix(labels, classes)
    ridge = LeftOut(features, keep=torch.ones(len(labels), dtype=torch.bool))
    scores = {each: ridge.scores(targets, each) for each in STRENGTHS}
    strength = min(scores, key=lambda each: held_out_loss(scores[each], targets, several=False))
    return scores[strength], strength


def with_errors(labels: Tensor, clean: Tensor, kind: str, rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """Changed labels, and which are (n,). `clean`: probabilities (n, C) of a classifier of the clean labels."""
    draw, classes = np.random.default_rng(seed), clean.shape[1]
    rows = torch.from_numpy(draw.choice(len(labels), round(rate * len(labels)), replace=False))
    given = labels.clone()
    if kind == "symmetric":
        given[rows] = (labels[rows] + torch.from_numpy(draw.integers(1, classes, len(rows)))) % classes
    else:
        mixed = torch.stack([clean[labels == each].mean(0) for each in range(classes)]).fill_diagonal_(-1)
        given[rows] = mixed.argmax(1)[labels[rows]]
    return given, torch.isin(torch.arange(len(labels)), rows)


def quality(labels: Tensor, probabilities: Tensor) -> dict[str, Any]:
    """Cleanlab's label quality, in its two usual forms."""
    from cleanlab.rank import get_label_quality_scores  # type: ignore[import-not-found]

    known, chances = labels.numpy(), probabilities.double().numpy()
    chances /= chances.sum(1, keepdims=True)
    return {
        name: -get_label_quality_scores(known, chances, method=name)
        for name in ("self_confidence", "normalized_margin")
    }


def logistic(features: Tensor, labels: Tensor) -> Tensor:
    """What a user of cleanlab would compute: probabilities of held-out photos."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.001, max_iter=100))
    return torch.from_numpy(cross_val_predict(model, features.numpy(), labels.numpy(), method="predict_proba"))


def cell(
    photos: tuple[Tensor, Tensor, Tensor, float], kind: str, rate: float, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One line of the record; `photos`: features, labels, and scores and strength of a classifier of these labels."""
    features, labels, clean, strength = photos
    classes = int(labels.max()) + 1
    given, wrong = with_errors(labels, (10 * clean).softmax(1), kind, rate, seed)
    first, _ = best_scores(features, given, classes)
    chances = judge_one(first, given_matrix(given, classes)).logits.softmax(1)
    judged = judge_labels(features, given, classes)
    order = judged.wrong
    precision = {"ours": order.numpy()} | {f"cleanlab {name}": each for name, each in quality(given, chances).items()}
    if options.logistic and rate == 0.1:
        own = quality(given, logistic(features, given))
        precision |= {f"cleanlab {name}, logistic regression": each for name, each in own.items()}
    cut = judged.wrong > 0.5
    ticked = torch.zeros_like(wrong)
    ticked[order.argsort(descending=True)[: round(TICKED_SHARE * len(given))]] = True
    found = int((ticked & wrong).sum())
    said, right = judged.wrong.double().numpy(), ticked.numpy()
    left = errors_left(said[right], wrong.numpy()[right], said[~right], np.ones(int((~right).sum())))
    test = ~wrong & torch.from_numpy(np.random.default_rng(seed + 100).random(len(given)) < TEST)
    others, after = LeftOut(features, keep=~test), {}
    for name, each in (("clean", labels), ("given", given), ("ticked", torch.where(ticked, labels, given))):
        scores = others.scores(given_matrix(each, classes), strength)
        after[name] = 100 * float((scores.argmax(1) == labels)[test].float().mean())
    return {
        "photos": len(given), "classes": classes, "errors": int(wrong.sum()),
        "precision": {name: float(average_precision_score(wrong, each)) for name, each in precision.items()},
        "share": judged.shares["wrong"], "cut": int(cut.sum()), "expected_in_cut": float(judged.wrong[cut].sum()),
        "errors_in_cut": int((cut & wrong).sum()), "errors_ticked": found,
        "left": int(wrong.sum()) - found, "left_estimate": left, "accuracy": after,
    }  # fmt: skip


def doubted(place: Path, people: Path, photos: int) -> list[str]:
    """Average precision for photos of CIFAR-10 that fewer than 80 % (50 %) of people give their label, by seed."""
    with (people / "test_index_to_file.csv").open() as stream:
        number = {row["file"].removeprefix("test/"): int(row["index"]) for row in csv.DictReader(stream)}
    counts = np.load(people / "cifar10h-counts.npy")
    labels = np.load(people / "cifar10_test_labels_original_order.npy")
    agree = counts[np.arange(len(labels)), labels] / counts.sum(1)
    lines = ["| seed | photos | agree below | photos of these | average precision: ours | self confidence | margin |"]
    lines += ["|---" * 7 + "|"]
    for seed in (0, 1, 2):
        features, given, ids = read(place, photos, seed)
        classes = int(given.max()) + 1
        chances = judge_one(best_scores(features, given, classes)[0], given_matrix(given, classes)).logits.softmax(1)
        ours = judge_labels(features, given, classes).wrong.numpy()
        people_agree = agree[[number[name] for name in ids]]
        for bar in (0.8, 0.5):
            found = [average_precision_score(people_agree < bar, each) for each in (
                ours, *quality(given, chances).values()
            )]  # fmt: skip
            numbers = " | ".join(f"{each:.3f}" for each in found)
            lines.append(f"| {seed} | {len(ids)} | {bar:.0%} | {(people_agree < bar).sum()} | {numbers} |")
    return lines


def sets(text: str, place: Path) -> list[str]:
    """The list of missing labels against the true sets of labels, when one label of each set is given."""
    data = load_data(text)
    auto = resolve({"init": "simclr-demo", "data": "demo", "method": "auto"}, []).recipe.block.auto
    store = Store(place)
    parts = [store.rows(split) for split in SPLITS]
    outputs = Outputs(torch.cat([each.rows for each in parts]), torch.cat([each.readable for each in parts]))
    sides = (data.train, data.val)
    truth = torch.cat([images.given if images.truth is None else images.truth for images in sides]) > 0
    titles = "seed | photos | classes | classes a photo | the page says | listed | right | found | right by chance"
    lines = [f"| {titles} |", "|---" * 9 + "|"]
    for seed in (0, 1, 2):
        draw = torch.Generator().manual_seed(seed)
        given = torch.multinomial(truth.float(), 1, generator=draw).flatten()
        cut = len(data.train)
        images = [
            replace(data.train, given=given[:cut], truth=None), replace(data.val, given=given[cut:], truth=None)
        ]  # fmt: skip
        one = replace(data, train=images[0], val=images[1])
        _, found, notes = find_all(Photos(data=one, features=outputs, copies=[]), (auto.v_min, auto.g_min))
        hidden = truth.clone()
        hidden[torch.arange(len(given)), given] = False
        listed = [(each.photo, data.classes.index(each.suggested[0])) for each in found if each.kind == "missing"]
        right = sum(bool(hidden[pair]) for pair in listed)
        chance = float(hidden.sum()) / (len(given) * (len(data.classes) - 1))
        lines.append(
            f"| {seed} | {len(given)} | {len(data.classes)} | {truth.float().sum(1).mean():.1f} | {notes[0][:40]}... | "
            f"{len(listed)} | {right / max(len(listed), 1):.0%} | {right / int(hidden.sum()):.0%} | {chance:.0%} |"
        )
    return lines


def loop(folder: Path, init: str, out: Path, photos: int, seed: int) -> str:
    """Audit, perfect ticks on the first 15 % of the labels, apply, train, with the commands: accuracy on clean photos.

    A tenth of the training and validation labels is any other class. The class folders are in `folder`/train and /val.
    """
    draw = np.random.default_rng(seed)
    files = [path for part in ("train", "val") for path in sorted((folder / part).glob("*/*"))]
    drawn = [files[row] for row in draw.permutation(len(files))[: photos + photos // 2]]
    names = sorted({path.parent.name for path in drawn})
    wrong = set(draw.choice(photos, photos // 10, replace=False).tolist())
    truth = {}
    for row, path in enumerate(drawn):
        part = "test" if row >= photos else "val" if row % 5 == 0 else "train"
        other = names[(names.index(path.parent.name) + int(draw.integers(1, len(names)))) % len(names)]
        truth[f"{path.parent.name}-{row}{path.suffix}"] = path.parent.name
        kinds = {"test": path.parent.name} if part == "test" else {
            "true": path.parent.name, "given": other if row in wrong else path.parent.name
        }  # fmt: skip
        for kind, label in kinds.items():
            place = out / kind / ("" if kind == "test" else part) / label / f"{path.parent.name}-{row}{path.suffix}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path.resolve())

    def verb(*words: object) -> None:
        subprocess.run([sys.executable, "-m", "finetune_mile.cli", *map(str, words)], check=True)

    how = ("--init", init, "--size", 64)
    verb("audit", f"folder:{out / 'given'}", *how, "--out", out / "audit")
    listed = [row for row in pq.read_table(out / "audit/audit.parquet").to_pylist() if row["kind"] == "wrong"]
    with (out / "ticks.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(TICKED)
        for row in listed[: round(TICKED_SHARE * photos)]:
            true = truth[Path(row["id"]).name]
            verdict = ["right", "[]"] if true == row["given"] else ["relabel", json.dumps([true])]
            table.writerow(
                [out / "audit", "wrong", row["split"], row["id"], json.dumps([row["given"]]), "[]", *verdict]
            )
    verb("audit", "--apply", out / "ticks.csv", "--out", out / "ticked")
    accuracy = {}
    for kind in ("true", "given", "ticked"):
        verb("run", *how, "--data", f"folder:{out / kind}", "--trunk", "frozen", "--out", out / f"run-{kind}")
        verb("eval", "--model", f"run:{out / f'run-{kind}'}", "--data", f"folder:{out / 'test'}", "--draws", 0,
             "--out", out / f"eval-{kind}")  # fmt: skip
        accuracy[kind] = json.loads((out / f"eval-{kind}/results.json").read_text())["accuracy"]
    gap = accuracy["true"] - accuracy["given"]
    closed = f"{(accuracy['ticked'] - accuracy['given']) / gap:.0%}" if gap > 0 else "no gap"
    return f"| {seed} | {accuracy['given']:.1f} | {accuracy['ticked']:.1f} | {accuracy['true']:.1f} | {closed} |"


def rows(done: dict[str, Any]) -> list[str]:
    """The lines of the tables: means over the seeds."""
    titles = [
        "photos", "errors", "rate", "average precision: ours", "cleanlab, self confidence", "cleanlab, margin",
        "errors, estimate (95 % interval)", "first list: expected, real", "accuracy clean, given, ticked",
        "left: estimate, real",
    ]  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in dict.fromkeys(key.rpartition(" ")[0] for key in done):
        cells = [value for key, value in done.items() if key.rpartition(" ")[0] == name]

        def mean(values: list[float]) -> float:
            return statistics.fmean(values)

        keys = ("ours", "cleanlab self_confidence", "cleanlab normalized_margin")
        precision = [f"{mean([each['precision'][key] for each in cells]):.3f}" for key in keys]
        share = [100 * mean([each["share"][place] for each in cells]) for place in range(3)]
        lists = [mean([each[key] for each in cells]) for key in ("cut", "expected_in_cut", "errors_in_cut")]
        scores = [mean([each["accuracy"][key] for each in cells]) for key in ("clean", "given", "ticked")]
        left = [mean([each["left_estimate"][place] for each in cells]) for place in range(3)]
        data, kind, rate = name.split(" ")
        lines.append(
            f"| {data} | {kind} | {float(rate):.0%} | {' | '.join(precision)} | {share[0]:.1f} % ({share[1]:.1f} to "
            f"{share[2]:.1f}) | {lists[0]:.0f}: {lists[1]:.0f}, {lists[2]:.0f} | "
            f"{scores[0]:.1f}, {scores[1]:.1f}, {scores[2]:.1f} | {left[0]:.0f} ({left[1]:.0f} to {left[2]:.0f}), "
            f"{mean([each['left'] for each in cells]):.0f} |"
        )
    lines += ["", *summary(done)] if done else []
    others = [each["precision"] for each in done.values() if len(each["precision"]) > len(keys)]
    if others:
        lines.append("logistic regression: " + ", ".join(
            f"{key} {statistics.fmean(each[key] for each in others):.3f}" for key in others[0]))  # fmt: skip
    return lines


def summary(done: dict[str, Any]) -> list[str]:
    """All cells of a kind of error together."""
    lines = ["| | symmetric | confusable | all |", "|---|---|---|---|"]
    cells = [[each for key, each in done.items() if kind in key] for kind in (*KINDS, "")]

    def line(name: str, of: Callable[[list[dict[str, Any]]], str]) -> None:
        lines.append(f"| {name} | {' | '.join(of(each) for each in cells if each)} |")

    def held(key: str, true: Callable[[dict[str, Any]], float]) -> Callable[[list[dict[str, Any]]], str]:
        return lambda some: f"{sum(each[key][1] <= true(each) <= each[key][2] for each in some)} of {len(some)}"

    def sums(*values: Callable[[dict[str, Any]], float]) -> Callable[[list[dict[str, Any]]], str]:
        return lambda some: ", ".join(f"{sum(map(value, some)):,.0f}" for value in values)

    def precision(name: str) -> Callable[[list[dict[str, Any]]], str]:
        return lambda some: f"{statistics.fmean(each['precision'][name] for each in some):.3f}"

    line("average precision, this list", precision("ours"))
    line("cleanlab, self confidence", precision("cleanlab self_confidence"))
    line("cleanlab, margin", precision("cleanlab normalized_margin"))
    line("wrong labels: estimate, real", sums(lambda one: one["share"][0] * one["photos"], lambda one: one["errors"]))
    line("intervals of their share that hold it", held("share", lambda one: one["errors"] / one["photos"]))
    cut = (lambda one: one["cut"], lambda one: one["expected_in_cut"], lambda one: one["errors_in_cut"])
    line("more likely wrong than right: listed, expected, real", sums(*cut))
    line("left after ticks: estimate, real", sums(lambda one: one["left_estimate"][0], lambda one: one["left"]))
    line("intervals of what is left that hold it", held("left_estimate", lambda one: one["left"]))
    for rate in ("", *map(str, sorted(RATES))):
        picked = [each for key, each in done.items() if f" {rate} " in key or not rate]
        given, ticked, clean = (
            statistics.fmean(each["accuracy"][key] for each in picked) for key in ("given", "ticked", "clean")
        )
        lines.append(
            f"\nerrors {rate or 'of all rates'}: accuracy {given:.1f} with them, {ticked:.1f} after ticks, {clean:.1f} "
            f"with clean labels: {(ticked - given) / (clean - given):.0%} of the gap"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--features", action="append", default=[], metavar="NAME=STORE", help="of `finetune-mile embed`"
    )
    parser.add_argument("--photos", type=int, default=1000, help="of each data set")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--cleanlab", type=Path, help="a folder that cleanlab is installed in")
    parser.add_argument("--logistic", action="store_true", help="beside it cleanlab with a logistic regression")
    parser.add_argument("--doubted", type=Path, metavar="STORE", help="features of photos of CIFAR-10's test part")
    parser.add_argument("--people", type=Path, help="the folder with cifar10h-counts.npy")
    parser.add_argument("--sets", action="append", default=[], metavar="DATA=STORE", help="data with true sets")
    parser.add_argument("--loop", type=Path, metavar="FOLDER", help="with train/ and val/: audit, ticks, apply, train")
    parser.add_argument("--init", help="of --loop")
    parser.add_argument("--out", type=Path, default=Path("loop"), help="of --loop")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    sys.path += [str(options.cleanlab)] if options.cleanlab else []
    for text, place in (each.rsplit("=", 1) for each in options.sets):
        print(text, *sets(text, Path(place)), sep="\n")
    for seed in options.seeds if options.loop else []:
        print(loop(options.loop, options.init, options.out / str(seed), options.photos, seed), flush=True)
    if options.doubted:
        print("\n".join(doubted(options.doubted, options.people, options.photos)))
    text = options.record.read_text() if options.record.is_file() else ""
    done = {key: value for line in text.splitlines() for key, value in [json.loads(line)]}
    for seed in options.seeds:
        for name, place in (each.split("=", 1) for each in options.features):
            features, labels, _ = read(Path(place), options.photos, seed)
            photos = features, labels, *best_scores(features, labels, int(labels.max()) + 1)
            for rate in RATES:
                for kind in KINDS:
                    key = f"{name} {kind} {rate} {seed}"
                    if key in done:
                        continue
                    done[key] = cell(photos, kind, rate, seed, options)
                    with options.record.open("a") as stream:
                        stream.write(json.dumps([key, done[key]]) + "\n")
    print("\n".join(rows(done)))


if __name__ == "__main__":
    main()
