"""Does `audit` find wrong labels? The tables of docs/audit.md.

finetune-mile embed --init model.pth --data folder:CLOTHING/train --size 64
python benchmarks/audit.py --features clothing=CACHE/features/KEY --cleanlab DIR --record benchmarks/records/audit.jsonl

For each data set, kind of error, rate and seed: some labels are changed, all photos are judged, and the rankings are
compared by average precision. Errors are `symmetric` (any other class) or `confusable` (the class that a classifier of
the others mixes up with it most often). `cleanlab` ranks by its label quality on the same held-out probabilities
(those before our second pass), and, with --logistic, on those of scikit-learn's logistic regression (5 folds, on the
same standardised features). Then perfect ticks on the first 15 % of the photos of our list, and a new classifier: how
much of the gap to clean labels closes, on photos that were never changed. Every cell is a line of the record, and is
not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from finetune_mile.compute.rows import DONE, SPLITS, Store
from finetune_mile.learning.losses import given_matrix
from finetune_mile.learning.ridge import STRENGTHS, LeftOut
from finetune_mile.measures.audit import errors_left, held_out_loss, judge_labels, judge_one

RECORD = Path(__file__).resolve().parent / "records/audit.jsonl"
RATES, KINDS = (0.1, 0.2, 0.05), ("symmetric", "confusable")
TICKED, TEST = 0.15, 0.25  # shares of the photos
FEW = 8  # photos of a class; smaller classes are left out


def read(place: Path, photos: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features (n, D) and labels (n,) of some photos of a store."""
    store, rows, names = Store(place), [], []
    for split in SPLITS:
        done = store.state(split) == DONE
        if len(done):
            rows.append(store.rows(split).rows[torch.from_numpy(done)])
            listed = pq.read_table(place / f"{split}.parquet")["labels"].to_pylist()
            names += [labels[0] for labels, good in zip(listed, done, strict=True) if good]
    features, words = torch.cat(rows), np.array(names)
    drawn = np.random.default_rng(seed).permutation(len(words))[:photos]
    kept = np.unique(words[drawn], return_counts=True)
    drawn = drawn[np.isin(words[drawn], kept[0][kept[1] >= FEW])]
    return features[drawn], torch.from_numpy(np.unique(words[drawn], return_inverse=True)[1])


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
    order = (judged.scores.argmax(1) == given).float() * -1e3 + judged.wrong  # the list, then the others
    precision = {"ours": order.numpy()} | {f"cleanlab {name}": each for name, each in quality(given, chances).items()}
    if options.logistic and rate == 0.1 and seed == 0:
        own = quality(given, logistic(features, given))
        precision |= {f"cleanlab {name}, logistic regression": each for name, each in own.items()}
    cut = judged.wrong > 0.5
    ticked = torch.zeros_like(wrong)
    ticked[order.argsort(descending=True)[: round(TICKED * len(given))]] = True
    found = int((ticked & wrong).sum())
    expected = float(judged.wrong[ticked].sum())
    left = errors_left(found, expected, float(judged.wrong.sum()) - expected)
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
    ours = {key: [each["precision"][key] for each in done.values()] for key in keys} if done else {}
    if ours:
        lines.append("\nmean: " + ", ".join(f"{key} {statistics.fmean(values):.3f}" for key, values in ours.items()))
    others = [each["precision"] for each in done.values() if len(each["precision"]) > len(keys)]
    if others:
        lines.append("logistic regression: " + ", ".join(
            f"{key} {statistics.fmean(each[key] for each in others):.3f}" for key in others[0]))  # fmt: skip
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
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    sys.path += [str(options.cleanlab)] if options.cleanlab else []
    text = options.record.read_text() if options.record.is_file() else ""
    done = {key: value for line in text.splitlines() for key, value in [json.loads(line)]}
    for seed in options.seeds:
        for name, place in (each.split("=", 1) for each in options.features):
            features, labels = read(Path(place), options.photos, seed)
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
