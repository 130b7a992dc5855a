"""`rho: auto`: the pure parts against naive ones and known mixtures, and whole runs against plain training."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from shortcuts import SHORT, losses

from finetune_mile.core.problems import Problem
from finetune_mile.images.sets import Data
from finetune_mile.images.sources.grids import load
from finetune_mile.images.splits import hold_out, labelled_pools, make_pools
from finetune_mile.learning import evidence
from finetune_mile.learning.evidence import Verdict, clear_misses, labels_above, lee_liu
from finetune_mile.learning.losses import bce
from finetune_mile.learning.phases import Budget, Phase, StepView
from finetune_mile.methods import auto, mile
from finetune_mile.run import main

VALUES = auto.ImitationValues(beta=0.9, ce=3.0, teacher=0.5, gate="auto", v_min=1.0, g_min=0.5)
SHORT_AUTO = [
    *SHORT,
    "--arch",
    "grid-cnn",
    "--rho",
    "auto",
    "--k-t",
    "4",
    "--k-s",
    "2",
    "--set",
    "mile.warmup=8",
    "--set",
    "mile.last=4",
]


def judge(values, generation, logits, labels, prior, *, was_open=False):
    bars = None if values.gate == "off" else (values.v_min, values.g_min)
    return evidence.judge(logits, labels, prior, generation=generation, bars=bars, was_open=was_open)


def naive_lee_liu(logits, labels, prior):
    """The definition, one class, one rate and one image at a time."""
    n, classes = logits.shape
    top = [int(np.argmax(row)) for row in logits]
    rates = np.linspace(0.02, 0.98, 97)
    slots = [[logits[i, c] for i in range(n) if top[i] != c] for c in range(classes)]
    values, recalls = [], []

    def cuts(rate):
        shares = [min(max(rate * classes * p / sum(prior), 0.005), 0.98) for p in prior]
        return shares, [np.quantile(slots[c], 1 - shares[c]) for c in range(classes)]

    second = [i for i in range(n) if labels[i] != top[i]]
    for rate in rates:
        shares, at = cuts(rate)
        recall = sum(logits[i, labels[i]] > at[labels[i]] for i in second) / len(second)
        found = sum(len(s) * p for s, p in zip(slots, shares, strict=True)) / sum(map(len, slots))
        values.append(recall**2 / found)
        recalls.append(recall)
    best = int(np.argmax(values))
    hit = (recalls[best] * len(second) + 1) / (len(second) + 2)
    error = 2 * math.sqrt((1 - hit) / (hit * len(second)))
    rate = np.mean([r for r, v in zip(rates, values, strict=True) if v >= values[best] * (1 - error)])
    return values[best], error, rate, cuts(rate)[1]


def mixture(objects, *, given_top=0.6, classes=10, images=3000, blur=0.5, seed=0):
    """Logits of a good teacher on images with `objects` classes each, one of them given, and the true sets."""
    rng = np.random.default_rng(seed)
    present = np.argsort(rng.random((images, classes)), axis=1)[:, :objects]
    other = present[:, rng.integers(1, objects, images)] if objects > 1 else present
    other = other[np.arange(images), rng.integers(1, objects, images)] if objects > 1 else present[:, 0]
    labels = np.where(rng.random(images) < given_top, present[:, 0], other)
    truth = np.zeros((images, classes), dtype=bool)
    np.put_along_axis(truth, present, True, axis=1)
    logits = np.where(truth, -3.0, -6.0) + blur * rng.standard_normal((images, classes))
    logits[np.arange(images), present[:, 0]] = 0.5 + blur * rng.standard_normal(images)
    return torch.from_numpy(logits).float(), torch.from_numpy(labels), torch.from_numpy(truth)


def test_the_threshold_equals_the_definition():
    logits, labels, _ = mixture(4, images=300, blur=1.5)
    prior = torch.arange(1.0, 11.0)
    v, error, rate, thresholds = lee_liu(logits, labels, prior)
    naive = naive_lee_liu(logits.double().numpy(), labels.tolist(), prior.tolist())
    assert (v, error, rate) == pytest.approx(naive[:3], rel=1e-9)
    assert thresholds.tolist() == pytest.approx(naive[3], rel=1e-9)


@pytest.mark.parametrize("objects", [2, 4, 6])
def test_the_threshold_finds_the_share_that_is_there(objects):
    logits, labels, truth = mixture(objects)
    verdict = judge(VALUES, 0, logits, labels, torch.ones(10))
    assert verdict.open
    assert verdict.found_rate == pytest.approx((objects - 1) / 9, abs=0.05)
    found = logits > torch.tensor(verdict.thresholds)
    assert float((found == truth).float().mean()) > 0.95
    assert verdict.labels_found == pytest.approx(objects, abs=0.5)


def test_single_objects_and_uniform_noise_close_the_gate():
    logits, labels, _ = mixture(1, blur=2.0)  # a weak teacher: it errs where it is unsure
    single = judge(VALUES, 0, logits, labels, torch.ones(10))
    assert not single.open
    assert single.g < 0.5
    noise = torch.where(torch.rand(3000, generator=torch.manual_seed(0)) < 0.4, torch.randint(0, 10, (3000,)), labels)
    noisy = judge(VALUES, 0, mixture(1)[0], noise, torch.ones(10))
    assert not noisy.open
    assert noisy.v * (1 - 2 * noisy.v_error) < 1
    assert noisy.g > 0.5, "only v tells noise from objects"
    perfect = judge(VALUES, 0, mixture(1)[0], mixture(1)[0].argmax(1), torch.ones(10))
    assert not perfect.open
    assert perfect.v == perfect.g == 0


@pytest.mark.parametrize("images", [40, 60, 100, 500])
def test_a_small_calibration_set_seldom_opens_the_gate_by_chance(images):
    """A weak teacher of single objects, and a good one with a few wrong labels; sets of several objects still open."""
    weak, noise, several = 0, 0, 0
    for seed in range(40):
        logits, labels, _ = mixture(1, images=images, blur=2.0, seed=seed)
        weak += judge(VALUES, 0, logits, labels, torch.ones(10)).open
        logits, labels, _ = mixture(1, images=images, seed=seed)
        labels[: images // 20] = torch.from_numpy(np.random.default_rng(seed).integers(0, 10, images // 20))
        noise += judge(VALUES, 0, logits, labels, torch.ones(10)).open
        logits, labels, _ = mixture(4, images=images, seed=seed)
        several += judge(VALUES, 0, logits, labels, torch.ones(10)).open
    assert weak <= 2
    assert noise <= 4
    assert several >= (20 if images >= 100 else 0)


def test_a_class_that_is_always_top_is_always_found():
    logits, labels, _ = mixture(4, images=500)
    logits[:, 3] = 9.0
    verdict = judge(VALUES, 0, logits, labels, torch.ones(10))
    assert verdict.thresholds[3] == -math.inf
    assert (labels_above(verdict.thresholds, VALUES.beta, logits)[:, 3] > 0.9).all()


def test_an_open_gate_closes_on_evidence_only():
    logits, labels, _ = mixture(4, images=1000)
    g, error = clear_misses(logits, labels)
    strict = replace(VALUES, g_min=g + error / 2)  # neither side is sure
    assert not judge(strict, 0, logits, labels, torch.ones(10)).open
    assert judge(strict, 1, logits, labels, torch.ones(10), was_open=True).open


def test_the_gate_can_be_taken_away():
    logits, labels, _ = mixture(1, blur=2.0)
    assert judge(replace(VALUES, gate="off"), 0, logits, labels, torch.ones(10)).open


def test_misses_of_the_surest_images():
    logits = torch.zeros(1000, 2)
    logits[:, 0] = torch.arange(1000.0)
    labels = torch.zeros(1000, dtype=torch.long)
    labels[:500] = 1  # the unsure half is wrong
    assert clear_misses(logits, labels) == (0.0, 0.0)
    labels[990:] = 1  # 10 of the 50 surest
    g, error = clear_misses(logits, labels)
    assert (g, error) == pytest.approx((0.2 / 0.51, math.sqrt(0.2 * 0.8 / 50) / 0.51))


def imitation(values):
    return Phase(
        name="imitation", generation=0, steps=1, start="student", becomes=("student",), loss="bce", given=False,
        union=True, values=values,
    )  # fmt: skip


def test_targets_keep_the_order():
    logits = torch.tensor([[0.0, 2.0, 0.9], [-2.0, -2.0, -2.0]])
    expected = torch.tensor([[0.95, 0.9 + 0.1 / (1 + math.exp(-2.0)), 0.0], [0.0, 0.0, 0.0]])
    assert torch.allclose(auto.targets(imitation(replace(VALUES, thresholds=(-1.0, -1.0, 1.0))), logits), expected)


def test_the_softmax_term_is_the_given_label_and_the_teacher():
    logits, targets, teacher = torch.randn(2, 3), torch.rand(2, 3), torch.randn(2, 3)
    given = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    step = StepView(
        step=0, total_steps=1, samples=torch.arange(2), given=given, teacher_logits=teacher,
        class_weights=None, add_up=None, gather=None, processes=1,
        state=None,
    )  # fmt: skip
    ranks = 0.5 * teacher.softmax(1) + 0.5 * given
    expected = bce(logits, targets) - 3.0 * (ranks * logits.log_softmax(1)).sum() / 2
    assert float(auto.loss(imitation(VALUES), logits, targets, step)) == pytest.approx(float(expected), rel=1e-5)
    term, moved = (auto.loss(imitation(VALUES), z, targets, step) - bce(z, targets) for z in (logits, logits + 2))
    assert float(moved) == pytest.approx(float(term), rel=1e-4), "it does not see a common shift"
    plain = auto.loss(replace(imitation(VALUES), given=True), logits, targets, step)
    assert float(plain) == float(bce(logits, targets))


def test_a_closed_generation_is_an_interaction_that_goes_on():
    block = mile.Block(
        k_t=4, k_s=2, warmup=8, last=6, rho="auto", imitate_from="student", phase_steps="exact", union=False,
        pseudo_labels="batch", empty="negative", optimizer_state="keep",
    )  # fmt: skip
    budget = Budget(total_steps=24, steps_per_epoch=1.0, pool="all")
    planned = mile.in_turn(block, budget, {"given": False, "values": VALUES, "union": True})
    state = auto.State(None)
    blank = {"v": 1.0, "v_error": 0.1, "g": 1.0, "g_error": 0.1, "found_rate": 0.5, "labels_found": 2.0, "images": 9}
    state.verdicts = [Verdict(generation=g, open=g == 1, thresholds=(0.5,), **blank) for g in (0, 1)]
    decided = [state.as_decided(p) for p in planned]
    closed, opened = (p for p in decided if p.name == "imitation")
    assert (closed.given, closed.start, closed.pool) == (True, "teacher", "labelled")
    assert opened.values.thresholds == (0.5,)
    assert (opened.start, opened.pool, opened.steps) == ("student", "all", 6)
    assert [p.continues for p in decided] == [False, False, True, True, False]
    again = auto.State(None)
    again.load_state_dict(state.state_dict())
    assert again.verdicts == state.verdicts


def test_calibration_images_are_in_no_pool():
    images = load("2000").train
    pools = hold_out(make_pools(images, 0.5, 0), 0.05, 0)
    held = set(pools.calibration.tolist())
    assert 180 <= len(held) <= 220, "500 would be half of 1,000: a fifth at most"
    assert all(not held & set(members.tolist()) for members in pools.indices.values())
    assert len(pools.indices["labelled"]) + len(held) == len(make_pools(images, 0.5, 0).indices["labelled"])
    assert len(pools.indices["all"]) + len(held) == len(images)
    assert set(images.given[pools.calibration].tolist()) == set(range(10))
    other = hold_out(make_pools(images, 0.5, 1), 0.05, 1)
    assert set(other.calibration.tolist()) != held
    assert len(hold_out(make_pools(images, 1.0, 0), 0.4, 0).calibration) == pytest.approx(800, abs=5)


def test_a_class_with_one_image_keeps_it():
    images = load("200").train
    alone = int((images.given == 3).nonzero()[0])
    images.given[(images.given == 3).nonzero().flatten()[1:]] = 4
    pools = hold_out(make_pools(images, 1.0, 0), 0.05, 0)
    assert alone in pools.indices["labelled"]


def test_sets_of_given_labels_are_refused():
    images = load("40").train
    several = images.__class__(**{f: getattr(images, f) for f in images.__slots__} | {"given": images.truth.long()})
    with pytest.raises(Problem, match="one given label"):
        labelled_pools(
            Data(name="sets", classes=tuple("abcdefghij"), train=several, val=several),
            fraction=1.0, seed=0, calibration=0.05,
        )  # fmt: skip


def test_classes_of_one_image_leave_nothing_to_hold_out():
    images = load("10").train
    few = images.__class__(**{f: getattr(images, f) for f in images.__slots__} | {"given": torch.arange(len(images))})
    with pytest.raises(Problem, match="two labelled images or more"):
        hold_out(make_pools(few, 1.0, 0), 0.05, 0)


def records(folder, kind):
    return [r for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if r["kind"] == kind]


def weights(folder):
    return load_file(folder / "export/model.safetensors")


def test_a_closed_gate_is_plain_training_bit_by_bit(run_demo):
    never = ["--set", "auto.v_min=99", "--set", "optimizer.ema=0.9", "--set", "mile.optimizer_state=reset"]
    closed = run_demo("closed", *SHORT_AUTO, *never, "--set", "mile.warmup=0", "--k-t", "20")
    plain = run_demo(
        "plain",
        *SHORT,
        "--arch",
        "grid-cnn",
        "--method",
        "sigmoid",
        "--set",
        "auto.held_out=always",
        "--set",
        "optimizer.ema=0.9",
    )
    assert [r["open"] for r in records(closed, "gate")] == [False]
    assert losses(closed) == losses(plain)
    assert all(tensor.equal(weights(plain)[name]) for name, tensor in weights(closed).items())


@pytest.mark.parametrize(
    "flags",
    [
        ["--set", "auto.gate=off"],
        pytest.param(
            ["--set", "auto.gate=off", "--variant", "published", "--set", "head_bias=prior"], marks=pytest.mark.slow
        ),
        ["--set", "auto.v_min=0", "--set", "auto.g_min=0.95", "--semi", "all", "--fraction", "0.5"],
    ],
    ids=["open", "teacher", "semi"],
)
def test_a_stop_after_any_step_changes_no_decision(run_demo, tmp_path, stop_at, flags):
    whole, stopped = run_demo("whole", *SHORT_AUTO, *flags), tmp_path / "stopped"
    arguments = [*SHORT_AUTO, *flags, "--out", str(stopped)]
    for step in (8, 12, 13, 14, 19, 22, 24):
        stop_at(step)
        assert main(arguments) == 143
        arguments = ["--resume", str(stopped)]
    stop_at(None)
    assert main(arguments) == 0
    assert losses(stopped) == losses(whole)
    assert all(tensor.equal(weights(whole)[name]) for name, tensor in weights(stopped).items())
    assert records(stopped, "gate") == records(whole, "gate")
    assert len(records(whole, "gate")) >= 2
    assert "gate" in (whole / "report.html").read_text().lower()


def test_an_imitation_starts_at_the_thresholds(run_demo, monkeypatch):
    """The bias moves down by the thresholds before an imitation, and up again for the next teacher."""
    moved = []
    entered = auto.State.entered

    def watched(self, phase):
        from finetune_mile.networks.heads import get_head

        before = get_head(self.run.roles.learner).bias.detach().clone()
        entered(self, phase)
        after = get_head(self.run.roles.learner).bias.detach()
        moved.append((phase.name, after - before, self.shift, phase.values))

    monkeypatch.setattr(auto.State, "entered", watched)
    run_demo("open", *SHORT_AUTO, "--set", "auto.gate=off")
    kinds = [name for name, *_ in moved]
    assert kinds == ["interaction", "interaction", "imitation", "interaction", "imitation"]
    down, up, stays = moved[2], moved[3], moved[4]
    thresholds = torch.tensor(down[3].thresholds)  # infinite where a class is every image's top one
    assert torch.allclose(down[1], -torch.where(thresholds.isfinite(), thresholds, 0.0), atol=1e-5)
    assert torch.allclose(up[1], down[2], atol=1e-5)
    assert float(stays[1].abs().max()) == 0, "the student's own weights are where they were"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--rho", "aut"], "--rho aut: must be a number between 0 and 1, or auto"),
        (["--rho", "1"], "--rho 1: must be a number between 0 and 1, or auto"),
        (["--recipe", "multi-mnist/mile", "--data", "demo", "--rho", "auto"], "--rho auto needs a block auto:"),
        (
            ["--rho", "auto", "--set", "mile.pseudo_labels=cycle"],
            "--rho auto needs mile.pseudo_labels: batch, and it is cycle",
        ),
        (["--method", "noisy-student", "--rho", "auto"], "--rho auto: auto is for --method mile"),
    ],
)
def test_wrong_settings_are_named(capsys, flags, sentence):
    assert main(flags) == 2
    assert sentence in capsys.readouterr().err


def test_method_auto_is_the_name_and_rho_auto_an_alias(run_demo):
    alias = run_demo("alias", *SHORT_AUTO, "--set", "auto.gate=off")
    flags = [word for word in SHORT_AUTO if word not in ("--rho", "auto")]
    named = run_demo("named", *flags, "--method", "auto", "--set", "auto.gate=off")
    assert all(tensor.equal(weights(alias)[name]) for name, tensor in weights(named).items())
    assert losses(named) == losses(alias)
