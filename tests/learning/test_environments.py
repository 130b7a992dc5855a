"""IRM and REx: the penalties against naive ones, parts of a batch against the whole, and runs."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from idx_files import write_mnist
from shortcuts import SHORT, losses

from finetune_mile.checkpoints.loading import open_with_head
from finetune_mile.core.problems import Problem
from finetune_mile.learning.phases import Budget, Phase, StepView
from finetune_mile.methods import get_method
from finetune_mile.run import main


def batch(size=24, classes=3, seed=0):
    """Logits that want a gradient, one-hot targets, and environments 0 and 2 of 3."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, classes, generator=generator).requires_grad_()
    labels = torch.randint(classes, (size,), generator=generator)
    return logits, F.one_hot(labels, classes).float(), 2 * torch.randint(2, (size,), generator=generator)


def penalised(kind, logits, targets, environment, *, add_up=None, weight=7.0):
    """The loss of the method, of one process or of two that add up."""
    step = StepView(
        step=0, total_steps=1, samples=torch.arange(len(logits)), given=targets, teacher_logits=None,
        class_weights=None, add_up=add_up, gather=None, processes=1 if add_up is None else 2,
        state=SimpleNamespace(environment=environment, count=3),
    )  # fmt: skip
    phase = Phase(
        name="interaction", generation=0, steps=1, start="student", becomes=("student",), loss="cross_entropy",
        values=weight,
    )  # fmt: skip
    return get_method(kind).loss(phase, logits, targets, step)


def naive(kind, weight, logits, targets, environment):
    """As one would write it in a notebook: autograd makes IRM's gradient."""
    risks, penalties = [], []
    for e in environment.unique():
        here = environment == e
        factor = torch.ones((), requires_grad=True)
        risk = F.cross_entropy(factor * logits[here], targets[here])
        (slope,) = torch.autograd.grad(risk, factor, create_graph=True)
        risks.append(risk)
        penalties.append(slope**2)
    risks = torch.stack(risks)
    extra = torch.stack(penalties).mean() if kind == "irm" else risks.var(unbiased=False)
    return risks.mean() + weight * extra


@pytest.mark.parametrize("kind", ["irm", "rex"])
def test_loss_and_gradient_equal_a_naive_one(kind):
    logits, targets, environment = batch()
    ours = penalised(kind, logits, targets, environment)
    theirs = naive(kind, 7.0, logits, targets, environment)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["irm", "rex"])
def test_processes_with_parts_of_a_batch_average_to_the_gradient_of_the_whole(kind):
    logits, targets, environment = batch()
    whole = penalised(kind, logits, targets, environment)
    halves, sums = (slice(0, 12), slice(12, 24)), []
    for half in halves:  # what each process would add up
        penalised(kind, logits[half], targets[half], environment[half], add_up=lambda own: sums.append(own) or own)
    parts = [penalised(kind, logits[h], targets[h], environment[h], add_up=lambda _: sums[0] + sums[1]) for h in halves]
    assert [p.item() for p in parts] == pytest.approx([whole.item()] * 2, rel=1e-5)
    wanted = torch.autograd.grad(whole, logits)[0]
    torch.testing.assert_close(torch.autograd.grad((parts[0] + parts[1]) / 2, logits)[0], wanted, rtol=1e-4, atol=1e-7)


def test_class_weights_are_those_of_the_plain_loss():
    from finetune_mile.learning.losses import cross_entropy
    from finetune_mile.paper.irm import environment_sums

    logits, targets, environment = batch()
    weights = torch.tensor([0.5, 1.0, 3.0])
    sums = environment_sums(logits, targets, torch.zeros_like(environment), 1, weights)
    assert (sums[0, 1] / sums[0, 0]).item() == pytest.approx(cross_entropy(logits, targets, weights).item(), rel=1e-5)
    factor = torch.ones((), requires_grad=True)
    (slope,) = torch.autograd.grad(cross_entropy(factor * logits, targets, weights), factor)
    assert (sums[0, 2] / sums[0, 0]).item() == pytest.approx(slope.item(), rel=1e-4)


def test_the_weight_changes_where_a_phase_ends():
    method, budget = get_method("irm"), Budget(total_steps=10, steps_per_epoch=1.0)

    def phases(anneal):
        block = method.Block(weight=100.0, anneal=anneal, anneal_weight=1.0, optimizer_state="keep")
        return method.phases(block, budget)

    assert [(p.steps, p.values, p.start) for p in phases(3)] == [(3, 1.0, "student"), (7, 100.0, "student")]
    assert [p.steps for p in phases(0)] == [10]
    with pytest.raises(Problem, match=r"anneal: 10 of 10 steps"):
        phases(10)


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    return write_mnist(tmp_path_factory.mktemp("mnist"), 300, 60)


def flags(mnist, method, *more):
    data = ["--recipe", "ood/colored-mnist-plus", "--data", f"colored-mnist+:{mnist}?side=14", "--method", method]
    return [*data, "--steps", "20", "--batch-size", "16", "--set", "log_every=1", *more]


@pytest.mark.parametrize("method", ["irm", "rex"])
def test_a_run_is_the_mean_risk_plus_the_penalty_and_reloads(run_demo, mnist, method):
    """With weight 0 the loss is the mean of the environments' risks; the penalty adds to it from its step on."""
    out = run_demo(method, *flags(mnist, method, "--set", f"{method}.anneal=10", "--set", f"{method}.anneal_weight=0"))
    bare = run_demo("bare", *flags(mnist, method, "--set", f"{method}.weight=0", "--set", f"{method}.anneal=0"))
    assert len(losses(out)) == 20
    assert losses(out)[:10] == losses(bare)[:10]
    assert losses(out)[10] > losses(bare)[10]
    results = json.loads((out / "results.json").read_text())
    assert {"accuracy", "main_accuracy", "digit_accuracy", "colour_on_digits", "other_colour_on_digits"} <= set(results)
    opened = open_with_head(str(out), "--init")
    network, how, classes = opened.network, opened.card.preprocess, opened.classes
    assert network(torch.zeros(2, 3, 14, 14)).shape == (2, 4)
    assert (how.size, how.mean, classes) == (14, (0.0, 0.0, 0.0), ("0-4", "5-9", "green", "red"))


def test_a_stop_in_either_part_changes_nothing(run_demo, tmp_path, mnist, stop_at):
    words = flags(mnist, "irm", "--set", "irm.anneal=7")
    whole, stopped = run_demo("whole", *words), tmp_path / "stopped"
    arguments = [*words, "--out", str(stopped)]
    for step in (3, 7, 12):
        stop_at(step)
        assert main(arguments) == 143
        arguments = ["--resume", str(stopped)]
    stop_at(None)
    assert main(arguments) == 0
    assert losses(stopped) == losses(whole)
    assert (stopped / "results.json").read_text() == (whole / "results.json").read_text()


def test_what_is_refused(tmp_path, mnist, capsys):
    block = [f"--set=irm.{s}" for s in ("weight=1", "anneal=0", "anneal_weight=1", "optimizer_state=keep")]
    assert main([*SHORT, "--method", "irm", *block, "--out", str(tmp_path / "run")]) == 2
    assert "--method irm needs images from several environments" in capsys.readouterr().err
    assert main([*flags(mnist, "rex"), "--set", "accumulate=2", "--out", str(tmp_path / "run")]) == 2
    assert "needs the complete batch at once" in capsys.readouterr().err
    assert main([*SHORT, "--method", "rex", "--out", str(tmp_path / "run")]) == 2
    assert "needs a block rex:" in capsys.readouterr().err
    assert main([*flags(mnist, "rex"), "--rho", "0.1", "--out", str(tmp_path / "run")]) == 2
    assert "--rho belongs to --method mile or noisy-student" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
