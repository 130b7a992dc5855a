"""WAN, large-loss rejection and ROLE: their losses against naive ones, and what ROLE remembers."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from shortcuts import SHORT, losses

from finetune_mile.core.problems import Problem
from finetune_mile.learning.phases import Budget, RunView, StepView
from finetune_mile.measures.guards import LossAlarm
from finetune_mile.methods import get_method
from finetune_mile.paper import role
from finetune_mile.run import main

LOGITS = torch.tensor([[2.0, -1.0, 0.5, -3.0], [0.1, 1.5, -0.5, 2.5]])
GIVEN = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])


def step_view(step=0, total=10, state=None):
    return StepView(
        step=step, total_steps=total, samples=torch.arange(2), given=GIVEN, teacher_logits=None,
        class_weights=None, add_up=lambda x: x, gather=lambda x: x, processes=1, state=state,
    )  # fmt: skip


def phase_of(name, **block):
    method = get_method(name)
    settings = None if method.Block is None else method.Block(**block)
    return method, method.phases(settings, Budget(total_steps=10, steps_per_epoch=1.0))[0]


def test_wan_is_bce_with_weak_negatives():
    method, phase = phase_of("wan")
    p = LOGITS.sigmoid()
    by_hand = -(GIVEN * p.log() + (1 - GIVEN) * (1 - p).log() / 3).sum() / 2
    assert float(method.loss(phase, LOGITS, GIVEN, step_view())) == pytest.approx(float(by_hand), rel=1e-5)
    flat = torch.zeros(2, 4)
    assert float(method.loss(phase, flat, GIVEN, step_view())) == pytest.approx(
        method.untrained_loss(phase, 4, 1.0, "zero"), rel=1e-5
    )


@pytest.mark.parametrize(("step", "left_out"), [(0, 0), (5, 1), (9, 2)])
def test_large_losses_are_left_out_more_and_more(step, left_out):
    """Of six entries that were not given, 40 % at the end: the largest ones, 2.5 and then 0.5, go first."""
    method, phase = phase_of("large-loss", share=0.4)
    entries = torch.nn.functional.softplus(torch.where(GIVEN > 0, -LOGITS, LOGITS))
    negative = sorted(entries[GIVEN == 0].tolist())
    by_hand = (float(entries[GIVEN > 0].sum()) + sum(negative[: 6 - left_out])) / 2
    found = method.loss(phase, LOGITS, GIVEN, step_view(step))
    assert float(found) == pytest.approx(by_hand, rel=1e-5)


def naive_role(logits, estimates, expected):
    """As the paper's formulas are written, with autograd for both sides."""
    f, y = logits.sigmoid(), estimates.sigmoid()

    def side(a, b):
        positive = -(GIVEN * a.log()).sum(1).mean()
        cross = -(b.detach() * a.log() + (1 - b.detach()) * (1 - a).log()).sum(1).mean()
        return positive + cross + ((a.sum(1).mean() - expected) / a.shape[1]) ** 2

    return (side(f, y) + side(y, f)) / 2


def test_role_is_the_papers_loss_and_moves_its_estimates_by_their_slope():
    method, phase = phase_of("role", expected=1.5, estimate_lr=0.5)
    state = role.State(RunView(roles=None, num_classes=4, given=torch.tensor([0, 1]), environment=None, held_out=None))
    assert state.estimates.sigmoid()[0, 0] == pytest.approx(0.995, abs=1e-4)
    assert bool((state.estimates.sigmoid()[0, 1:] - 0.5).abs().le(0.1001).all())
    before = state.estimates.clone()
    ours, theirs = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    view = step_view(state=state)
    loss = method.loss(phase, ours, GIVEN, view)
    estimates = before.clone().requires_grad_()
    expected = naive_role(theirs, estimates, 1.5)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    state.after_step(view, LOGITS)
    torch.testing.assert_close(state.estimates, before - 0.5 * 2 * estimates.grad, rtol=1e-4, atol=1e-6)


def test_role_raises_no_alarm_at_its_start():
    """With 1,000 classes and a prior bias its first loss is 200 times that of BCE on a new head, and that is right."""
    method, phase = phase_of("role")
    alarm = LossAlarm(
        untrained_loss=method.untrained_loss, num_classes=1000, given_labels=1.0, head_bias="prior", advice="--lr 0.1"
    )
    assert alarm.see(phase, 1700.0, step=10, done=10, steps=10, labels=None) is None


def test_role_is_refused_where_its_estimates_do_not_fit(monkeypatch):
    monkeypatch.setattr(role.os, "sysconf", {"SC_AVPHYS_PAGES": 1, "SC_PAGE_SIZE": 4096}.get)
    view = SimpleNamespace(num_classes=1000, given=torch.zeros(10_000, dtype=torch.long))
    with pytest.raises(Problem, match=r"keeps 40,000,000 bytes of label estimates \(10,000 images x 1,000 classes\)"):
        role.State(view)


def test_roles_estimates_survive_a_stop(run_demo, tmp_path, stop_at):
    flags = [*SHORT, "--method", "role"]
    whole, stopped = run_demo("whole", *flags), tmp_path / "stopped"
    arguments = [*flags, "--out", str(stopped)]
    for step in (3, 10, 24):
        stop_at(step)
        assert main(arguments) == 143
        arguments = ["--resume", str(stopped)]
    stop_at(None)
    assert main(arguments) == 0
    ours, theirs = (load_file(f / "export/model.safetensors") for f in (stopped, whole))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert losses(stopped) == losses(whole)


def test_a_block_whose_settings_have_defaults_need_not_be_written(capsys):
    assert main(["--method", "large-loss", "--set", "accumulate=1", "--explain", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["large_loss.share"] == {"value": 0.02, "set_by": "schema"}
