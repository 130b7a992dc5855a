"""A run that learns nothing says so: in training, and as the first line of everything that it leaves behind."""

import json
import re

from shortcuts import SHORT

from finetune_mile.run import main

FLAGS = [*SHORT, "--data", "demo:800", "--method", "sigmoid", "--set", "log_every=10"]


def test_a_run_that_learns_nothing_says_so_first(tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*FLAGS, "--lr", "300", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    rising = [line for line in printed.err.splitlines() if line.startswith("warning: the loss is ")]
    assert len(rising) == 1, "once per run"
    assert "at step 10, " in rising[0]
    assert "try --lr 30" in rising[0]
    sentence = "This model learned nothing useful: accuracy"
    said = printed.out.splitlines()
    assert said[0].startswith(f"warning: {sentence}")
    assert said[1].startswith("sigmoid on demo"), "the table follows"
    results = json.loads((out / "results.json").read_text())
    assert results["chance_accuracy"] == 10.0
    assert 10.0 <= results["majority_accuracy"] < 30.0
    body = (out / "report.html").read_text().partition("<body>")[2].strip()
    assert sentence in body.partition("<h2")[0], "before everything else"
    card = (out / "export/README.md").read_text().split("---\n", 2)[2]
    assert card.startswith(f"> **Warning:** {sentence}")


def test_a_loss_that_is_not_finite_names_the_flags(tmp_path, capsys):
    flags = ["--lr", "1e30", "--set", "optimizer.name=sgd", "--set", "optimizer.head_lr=1e30"]
    assert main([*FLAGS, *flags, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert re.search(r"error: the loss is nan at step \d+ \(interaction 0\). Most likely the learning rate", said)
    assert "--lr 1e+29 --set optimizer.head_lr=1e+29" in said
    assert "--set optimizer.clip=1" in said
