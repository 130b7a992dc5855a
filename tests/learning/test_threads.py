"""How many threads little and much work get."""

import pytest
import torch

from finetune_mile.learning import probe
from finetune_mile.learning.probe import SMALL, threads_for


@pytest.fixture
def three():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three")
def test_little_work_gets_one_thread_and_much_gets_all():
    for work, threads in ((0, 1), (SMALL - 1, 1), (SMALL, 3)):
        with threads_for(work):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    with pytest.raises(ValueError, match="stop"), threads_for(0):
        raise ValueError("stop")
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three")
def test_a_small_probe_is_fitted_by_one_thread(monkeypatch):
    seen, fit = [], probe._fit
    monkeypatch.setattr(probe, "_fit", lambda *given: seen.append(torch.get_num_threads()) or fit(*given))
    draw = torch.Generator().manual_seed(0)
    features, targets = torch.randn(30, 8, generator=draw), torch.eye(3).repeat(10, 1)
    probe.fit_probe(features, targets, "softmax", seed=0)
    assert set(seen) == {1}
