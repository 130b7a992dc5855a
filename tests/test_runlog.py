"""Run folders: who may write into one."""

import pytest

from finetune_mile import runlog
from finetune_mile.problems import Problem
from finetune_mile.runlog import RunFolder, alone


def test_a_run_folder_has_one_writer_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(runlog, "LOCK_SECONDS", 0.0)
    folder = RunFolder.create(tmp_path / "run", "a: 1", overwrite=False)
    folder.update(status="running")
    with alone(folder.path):
        with pytest.raises(Problem, match="another process is at work on this run"), alone(folder.path):
            pass
        with pytest.raises(Problem, match="another process is at work on this run"):
            RunFolder.create(folder.path, "a: 2", overwrite=True)
    assert (folder.path / "recipe.yaml").read_text() == "a: 1"
    assert not list(tmp_path.glob(".run.*")), "no leftovers"
    replaced = RunFolder.create(folder.path, "a: 2", overwrite=True)
    assert replaced.info["began"] > folder.info["began"]
    with alone(folder.path):
        assert (folder.path / "recipe.yaml").read_text() == "a: 2"
