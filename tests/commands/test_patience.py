"""`--patience`: a run stops when its validation score does not rise any more, and keeps the best weights."""

import json

import pytest
from safetensors.torch import load_file
from shortcuts import SHORT, SHORT_MILE

from finetune_mile.run import main

PLAIN = [*SHORT, "--method", "sigmoid", "--set", "optimizer.schedule=constant", "--set", "optimizer.warmup=0"]
OFTEN = ["--set", "evaluate.every=2", "--patience", "2"]


def weights(run):
    return load_file(run / "export/model.safetensors")


def same(one, two):
    return all(one[name].equal(two[name]) for name in one)


def expected(run, patience, role):
    """Chosen and last step, read from the evaluations that a run recorded."""
    best, waited = None, 0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] != "evaluation" or record["role"] != role:
            continue
        if best is None or record["accuracy"] > best["accuracy"]:
            best, waited = record, 0
        else:
            waited += 1
        if waited == patience:
            break
    return {"chosen_step": best["step"], "last_step": record["step"]}


def results(run):
    return json.loads((run / "results.json").read_text())


def test_a_run_stops_early_and_a_stopped_one_goes_on_to_the_same_end(run_demo, stop_at, tmp_path, capsys):
    run = run_demo("run", *PLAIN, *OFTEN)
    scores = results(run)
    assert {key: scores[key] for key in ("chosen_step", "last_step")} == expected(run, 2, "student")
    assert scores["last_step"] < 24
    printed = capsys.readouterr()
    assert f"stopped early at step {scores['last_step']} of 24" in printed.err
    assert f"the weights of step {scores['chosen_step']} were chosen by these validation images" in printed.out
    assert json.loads((run / "export/config.json").read_text())["steps"] == scores["chosen_step"]
    short = run_demo("short", *PLAIN, "--steps", str(scores["chosen_step"]))
    assert same(weights(run), weights(short)), "the best weights, not the last ones"
    stop_at(scores["last_step"] - 1)
    again = tmp_path / "again"
    assert main([*PLAIN, *OFTEN, "--out", str(again)]) == 143
    stop_at(None)
    assert main(["--resume", str(again)]) == 0
    assert results(again) == scores
    assert same(weights(run), weights(again))


def test_mile_is_judged_by_its_student(run_demo):
    run = run_demo("run", *SHORT_MILE, "--set", "evaluate.phases=true", "--patience", "1")
    scores = results(run)
    assert {key: scores[key] for key in ("chosen_step", "last_step")} == expected(run, 1, "student")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--patience", "2", "--set", "evaluate.images=0"], "evaluate.images is 0"),
        (["--patience", "2", "--set", "evaluate.every=8"], "--patience 2: the run has 3 evaluations of its student"),
        (["--patience", "2", "--set", "optimizer.ema=0.9"], "optimizer.ema"),
        (["--patience", "0"], "greater than 0"),
    ],
)
def test_what_could_never_stop_is_refused(tmp_path, capsys, flags, words):
    assert main([*PLAIN, *flags, "--out", str(tmp_path / "run")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
