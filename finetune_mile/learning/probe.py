"""Classifiers on fixed features: nearest neighbours, and a linear one whose L2 strength is chosen by cross-validation.

n images, D features, C classes. Only the few numbers of the features matter, not their scale: they are standardised and
divided by one number, so that the mean squared length of a row is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy.optimize
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

Activation = Literal["softmax", "sigmoid"]
STRENGTHS = tuple(10.0 ** (-half / 2) for half in range(14))  # from strong to weak: 1 to 10^-6.5
STRONGEST = STRENGTHS[6]  # that may be chosen: where few labels are held out, they vote for no weights at all
FOLDS, FEW = 5, 1000  # below so many images every fold is held out once; above, one of them is enough
PATIENCE = 2  # strengths in a row that are worse than the best before the search ends
ITERATIONS, SEARCH_ITERATIONS = 200, 40
NEIGHBOURS, HEAT = 20, 0.07  # DINO's k and temperature
QUERIES = 1024  # images that are compared with the bank at once
LEAST_SPREAD = 1e-6  # of a feature, relative to the largest: what is constant carries nothing
SMALL = 20_000_000  # multiplications of one operation: some milliseconds of one core


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """One thread for little work; the caller's number for more.

    Several threads wait for each other after each operation. Where other programs use the cores, that takes far longer
    than the work: a probe of 192 images took 11 to 19 s instead of 0.4.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if multiplications < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A fitted linear classifier: logits = ((features - mean) * scale) @ weight.T + bias."""

    mean: Tensor  # (D,)
    scale: Tensor  # (D,)
    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)
    strength: float  # of the L2 penalty that was chosen
    held_out_loss: float  # per image, at that strength

    def logits(self, features: Tensor) -> Tensor:
        """(n, D) to (n, C)."""
        return ((features.float() - self.mean) * self.scale) @ self.weight.T + self.bias


def fit_probe(
    features: Tensor, targets: Tensor, activation: Activation, *, seed: int = 0, strength: float | None = None
) -> Probe:
    """Fit on all images, with the strength that is best on images held out.

    Args:
        features: (n, D).
        targets: (n, C) of 0 and 1, at least one label for each image.
        activation: softmax: cross-entropy, several labels share an image; sigmoid: binary cross-entropy, summed over
            the classes.
        seed: of the folds.
        strength: of the L2 penalty, where it is known.
    """
    rows = features.float()
    mean = rows.mean(0)
    spread = rows.std(0, correction=0)
    scale = torch.where(spread > LEAST_SPREAD * spread.max().clamp(min=1e-30), 1 / spread.clamp(min=1e-30), 0.0)
    scale /= max(float((scale > 0).sum()), 1.0) ** 0.5
    z, y = (rows - mean) * scale, targets.float()
    if activation == "softmax":
        y = y / y.sum(1, keepdim=True)
    turn = None
    if len(z) < z.shape[1]:  # as many directions as images say it all
        u, s, turn = torch.linalg.svd(z, full_matrices=False)
        z = u * s
    loss, solution = float("nan"), None
    with threads_for(z.numel() * y.shape[1]):
        if strength is None:
            strength, loss, solution = _choose(z, y, activation, seed)
        if solution is None:
            solution = _start(z, y, activation)
            for each in (each for each in STRENGTHS if each > strength):
                solution = _fit(z, y, activation, each, solution, SEARCH_ITERATIONS)
        solution = _fit(z, y, activation, strength, solution, ITERATIONS)
    weight = solution[:, :-1] if turn is None else solution[:, :-1] @ turn
    return Probe(
        mean=mean, scale=scale, weight=weight.contiguous(), bias=solution[:, -1].clone(), strength=strength,
        held_out_loss=loss,
    )  # fmt: skip


def neighbour_votes(
    queries: Tensor, bank: Tensor, labels: Tensor, num_classes: int, *, k: int = NEIGHBOURS, temperature: float = HEAT
) -> Tensor:
    """Votes (n, C) of the k nearest images for their labels, each by exp(cosine / temperature), as in DINO and lightly.

    Args:
        queries: (n, D) features.
        bank: (m, D) features of labelled images.
        labels: (m,) their classes, or (m, C) of 0 and 1.
        num_classes: C.
        k: how many vote, at most m.
        temperature: of the votes.
    """
    bank = normalize(bank.float(), dim=1).T.contiguous()
    counted = []
    for some in queries.split(QUERIES):
        cosines, nearest = (normalize(some.float(), dim=1) @ bank).topk(min(k, len(labels)))
        votes, weights = cosines.new_zeros(len(some), num_classes), (cosines / temperature).exp()
        if labels.ndim == 1:
            votes.scatter_add_(1, labels[nearest], weights)
        else:
            for column, weight in zip(nearest.T, weights.T, strict=True):  # all at once would be (n, k, C)
                votes += weight.unsqueeze(1) * (labels[column] > 0)
        counted.append(votes)
    return torch.cat(counted)


def _choose(z: Tensor, y: Tensor, activation: Activation, seed: int) -> tuple[float, float, Tensor | None]:
    """The strength with the least loss on images held out, that loss, and a solution near the one for all images."""
    fold = torch.from_numpy(folds(y.argmax(1).numpy(), seed))
    tried = range(FOLDS) if len(z) < FEW else range(1)
    parts = [(fold != one, fold == one) for one in tried if (fold == one).any() and (fold != one).any()]
    if not parts:
        return STRENGTHS[len(STRENGTHS) // 2], float("nan"), None
    solutions = [_start(z[train], y[train], activation) for train, _ in parts]
    best, best_loss, near, worse = STRONGEST, float("inf"), solutions[0], 0
    for strength in STRENGTHS:
        total, count = 0.0, 0
        for number, (train, held) in enumerate(parts):
            solutions[number] = _fit(z[train], y[train], activation, strength, solutions[number], SEARCH_ITERATIONS)
            total += _loss(z[held], y[held], activation, solutions[number])[0] * int(held.sum())
            count += int(held.sum())
        if strength > STRONGEST:
            continue
        if total / count < best_loss:
            best, best_loss, near, worse = strength, total / count, solutions[0], 0
        else:
            worse += 1
            if worse == PATIENCE:
                break
    return best, best_loss, near if len(parts) == 1 else None


def folds(labels: npt.NDArray[np.int64], seed: int, count: int = FOLDS) -> npt.NDArray[np.int64]:
    """(n,) the fold of each image; the images of a class are spread evenly."""
    draw = np.random.default_rng(seed)
    result, offset = np.zeros(len(labels), dtype=np.int64), 0
    for label in np.unique(labels):
        members = draw.permutation(np.flatnonzero(labels == label))
        result[members] = (np.arange(len(members)) + offset) % count
        offset += len(members)  # classes of one image do not all fall into the first fold
    return result


def _start(z: Tensor, y: Tensor, activation: Activation) -> Tensor:
    """Zero weights, and the bias that gives every class its share: (C, D + 1), the bias last."""
    share = (y.sum(0) + 0.5) / (len(y) + 1.0)
    solution = z.new_zeros(y.shape[1], z.shape[1] + 1)
    solution[:, -1] = share.log() if activation == "softmax" else share.logit()
    return solution


def _fit(z: Tensor, y: Tensor, activation: Activation, strength: float, start: Tensor, iterations: int) -> Tensor:
    """Minimise the mean loss plus strength / 2 times the squared weights."""

    def objective(flat: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        solution = torch.from_numpy(flat).view(start.shape).float()
        loss, slope = _loss(z, y, activation, solution)
        slope[:, :-1] += strength * solution[:, :-1]
        penalty = strength / 2 * float(solution[:, :-1].double().square().sum())
        return loss + penalty, slope.double().flatten().numpy()

    options = {"maxiter": iterations, "ftol": 1e-7}
    first = start.double().flatten().numpy()
    result = scipy.optimize.minimize(objective, first, jac=True, method="L-BFGS-B", options=options)
    return torch.from_numpy(result.x).view(start.shape).float()


def _loss(z: Tensor, y: Tensor, activation: Activation, solution: Tensor) -> tuple[float, Tensor]:
    """The mean loss over the images, and its slope in `solution`."""
    logits = torch.addmm(solution[:, -1], z, solution[:, :-1].T)
    if activation == "softmax":
        log_shares = logits.log_softmax(1)
        loss, error = -(y * log_shares), log_shares.exp() - y
    else:
        loss, error = softplus(logits) - y * logits, logits.sigmoid() - y
    error /= len(z)
    slope = torch.cat([error.T @ z, error.sum(0).unsqueeze(1)], 1)
    return float(loss.sum(1).double().mean()), slope
