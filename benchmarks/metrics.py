"""Our measures against scikit-learn's, interleaved, on one core: python benchmarks/metrics.py.

Bars: F1 at least 20 times as fast, mean average precision at least 15 times, all measures of 50,000 x 1,000 logits in
less than 10 s. Values are compared too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from sklearn.metrics import average_precision_score, f1_score, label_ranking_average_precision_score

from finetune_mile.measures import metrics
from finetune_mile.measures.intervals import intervals
from finetune_mile.measures.metrics import measure

AP_CLASSES = 100  # scikit-learn would take minutes for all


def timed(work: Callable[[], float]) -> tuple[float, float]:
    """Seconds of processor time (whoever else uses the machine) and value."""
    began = time.process_time()
    value = work()
    return time.process_time() - began, value


def interleaved(name: str, ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> None:
    """Take turns, so that a busy machine is busy for both; the ratio is the median over rounds."""
    ratios, mine, other = [], [], []
    for _ in range(rounds):
        (a, value), (b, expected) = timed(ours), timed(theirs)
        assert abs(value - expected) < 1e-6, f"{name}: {value} is not {expected}"
        ratios.append(b / a)
        mine.append(a)
        other.append(b)
    print(
        f"{name:<28} ours {statistics.median(mine):7.3f} s  scikit-learn {statistics.median(other):7.3f} s  "
        f"{statistics.median(ratios):6.1f} times as fast ({min(ratios):.1f} to {max(ratios):.1f})",
        flush=True,
    )


def sample(images: int, classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, given labels, and label sets about as large as ReaL's; some are empty."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randint(0, classes, (images,), generator=generator)
    truth = torch.rand(images, classes, generator=generator) < 0.25 / classes
    truth[torch.arange(images), given] = torch.rand(images, generator=generator) < 0.85
    logits = torch.randn(images, classes, generator=generator) * 2 - 4 + 5 * truth
    return logits, given, truth


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logits, given, truth = sample(options.images, options.classes)
    predicted, known = logits.sigmoid() > 0.25, truth.any(1)
    print(f"{options.images:,} x {options.classes:,}, one thread, median of {options.rounds} rounds")
    interleaved(
        "F1 of sets", lambda: float(metrics.sample_f1(predicted, truth).mean()),
        lambda: float(f1_score(truth.numpy(), predicted.numpy(), average="samples", zero_division=0)), options.rounds,
    )  # fmt: skip
    few, few_true = logits[:, :AP_CLASSES].contiguous(), truth[:, :AP_CLASSES].contiguous()
    interleaved(
        f"mAP of {few.shape[1]} classes", lambda: float(metrics.class_precisions(few, [(few_true, None)])[0].mean()),
        lambda: float(average_precision_score(few_true.numpy(), few.numpy())), options.rounds,
    )  # fmt: skip
    interleaved(
        "label ranking precision", lambda: float(metrics.ranking_precision(logits[known], truth[known]).mean()),
        lambda: float(label_ranking_average_precision_score(truth[known].numpy(), logits[known].numpy())),
        options.rounds,
    )  # fmt: skip
    for activation in ("softmax", "sigmoid"):
        began = time.process_time()
        measured = measure(
            logits, given, truth, activation=activation, prediction_set="threshold", thresholds={"rho": 0.1}
        )
        middle = time.process_time()
        intervals(measured.samples)
        intervals(measured.by_class)
        end = time.process_time()
        count = len(measured.results())
        print(f"all {count} measures, {activation:<8} {middle - began:7.3f} s, their intervals {end - middle:.3f} s")


if __name__ == "__main__":
    main()
