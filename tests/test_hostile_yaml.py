"""YAML that would fill the memory or crash the interpreter, and values that would silently run another experiment."""

import json
import subprocess
import sys

import pytest
from shortcuts import ROOT

from finetune_mile.cli import main

LAUGHS = "x0: &x0 {a: 1}\n" + "".join(
    f"x{i}: &x{i} {{" + ", ".join(f"k{j}: *x{i - 1}" for j in range(9)) + "}\n" for i in range(1, 10)
)
HOSTILE = {
    "laughs": (LAUGHS, "cannot be used (it holds more than 100,000 values, aliases expanded)"),
    "deep": ("a: " + "[" * 100_000 + "]" * 100_000, "(it is nested more than 50 levels deep)"),
    "deep by aliases": (
        "x0: &x0 [1]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}]\n" for i in range(1, 60)),
        "cannot be used at line 1 (it is nested more than 50 levels deep by its aliases",
    ),
    "circle": (
        "a: &a {b: *a}\n",
        "cannot be used at line 1 (it is nested more than 50 levels deep by its aliases, or in a circle)",
    ),
    "long": ("a: " + "x" * 2_000_000, "larger than 1 MB"),
    "digits": ("seed: 1\nsteps: " + "9" * 5000, "is not YAML at line 2 (a value cannot be read"),
    "list as a mapping": ("!!map [a]", "is not YAML at line 1 (expected a mapping node, but found sequence"),
    "list as a set": ("a: 1\nb: !!set [a]", "is not YAML at line 2 (expected a mapping node, but found sequence"),
    "no date": ("steps: 2024-13-45", "is not YAML at line 1 (a value cannot be read"),
}


def limited(*words, cwd, seconds=20):
    """Run a command that must end soon and in little memory, in a process of its own: it might crash."""
    code = "import sys\nfrom finetune_mile.cli import main\nsys.exit(main(sys.argv[1:]))"
    return limited_code(code, *words, cwd=cwd, seconds=seconds)


def limited_code(code, *words, cwd, seconds=20):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30,) * 2)"
    command = [sys.executable, "-c", f"{limit}\n{code}", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=seconds)


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.mark.parametrize("name", HOSTILE)
def test_f5_a_hostile_recipe_is_one_sentence(recipes, name):
    text, sentence = HOSTILE[name]
    (recipes / "mine.yaml").write_text(text)
    done = limited("run", "--recipe", "mine.yaml", "--explain", cwd=recipes)
    assert done.returncode == 2, done.stderr[-500:]
    assert done.stderr.startswith("error: recipe mine.yaml: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_f5_many_keys_are_read_in_linear_time(recipes):
    (recipes / "mine.yaml").write_text("".join(f"key{i}: 1\n" for i in range(20_000)))
    done = limited("run", "--recipe", "mine.yaml", cwd=recipes, seconds=15)
    assert done.returncode == 2
    assert "more problems of this kind" in done.stderr
    assert len(done.stderr) < 20_000


def test_f5_a_hostile_value_of_set_is_one_sentence(recipes):
    for words in (["run"], ["pretrain"], ["table", "ssl", "--dry-run"]):
        done = limited(*words, "--set", "optimizer=" + "[" * 100_000, cwd=recipes)
        assert done.returncode == 2, done.stderr[-500:]
        assert "is not a YAML value (it is nested more than 50 levels deep)" in done.stderr
        assert len(done.stderr) < 500


def test_f5_a_hostile_card_is_one_sentence(recipes):
    (recipes / "x.yaml").write_text(LAUGHS)
    code = "from pathlib import Path; from finetune_mile.checkpoints.cards import read_card; read_card(Path('x.yaml'))"
    done = limited_code(code, cwd=recipes)
    assert "problems.Problem: card x.yaml is not valid: it holds more than 100,000 values" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--set", "steps=99999999999999999999"],
            "--set steps 99999999999999999999: input should be less than or equal",
        ),
        (["--set", "batch_size=99999999999"], "--set batch_size 99999999999: input should be less than or equal"),
        (["--set", "workers=1000000"], "--set workers 1000000: input should be less than or equal to 1024"),
        (["--epochs", "1e300"], "--epochs 1e+300: input should be less than or equal"),
        (["--seed", "4294967296"], "--seed 4294967296: input should be less than 4294967296"),
        (["--lr", ".inf"], "--lr .inf: input should be a valid number"),
        (["--lr", "inf"], "--lr inf: input should be a finite number"),
        (["--lr", "nan"], "--lr nan: input should be a finite number"),
        (["--set", "optimizer.lr=.inf"], "--set optimizer.lr inf: input should be a finite number"),
        (["--set", "mean=[.nan,0.5,0.5]"], "--set mean nan: input should be a finite number"),
        (["--set", "std=[0,0,0]"], "--set std 0: input should be greater than 0"),
    ],
)
def test_f5_f12_numbers_out_of_bounds_are_refused(recipes, bounded, capsys, words, sentence):
    assert main(["run", "--recipe", "demo", "--explain", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_f5_a_budget_of_too_many_generations_is_one_sentence(recipes):
    code = """
from finetune_mile.learning.phases import Budget
from finetune_mile.methods.mile import Block, phases
same = {"imitate_from": "student", "phase_steps": "exact", "union": False, "pseudo_labels": "batch"}
block = Block(k_t=3, k_s=2, warmup=0, rho=0.25, empty="negative", optimizer_state="keep", **same)
phases(block, Budget(total_steps=10**9, steps_per_epoch=1.0))"""
    done = limited_code(code, cwd=recipes)
    assert "Problem: steps: 1,000,000,000 steps make 200,000,000 generations (at most 100,000)" in done.stderr


# ------------------------------------------------------------------------------------------- flags

EMPTY = [
    ["run", "--lr", ""], ["run", "--seed", ""], ["run", "--steps", " "], ["run", "--lr="], ["run", "--init", ""],
    ["run", "--data", ""], ["run", "--out", ""], ["run", "--method", ""], ["run", "--resume", ""], ["run", "--k_t", ""],
    ["pretrain", "--lr", ""], ["pretrain", "--data="], ["check", "--steps", ""], ["check", "--table", ""],
    ["table", "ssl", "--runs", "", "--dry-run"], ["table", "ssl", "--only", "", "--dry-run"],
    ["eval", "--model", "run:x", "--out", ""], ["eval", "--truth", ""], ["check", "--data", "demo", "--list", ""],
]  # fmt: skip


@pytest.mark.parametrize("words", EMPTY, ids=" ".join)
def test_f12_an_empty_value_is_refused(recipes, bounded, capsys, words):
    assert main([*words, "--explain"] if words[0] in ("run", "pretrain") else words) == 2
    flag = next(word for word in words if word.startswith("--")) if "ssl" not in words else words[2]
    flag = {"--model": "--out"}.get(flag, flag) if words[0] == "eval" else "--list" if "--list" in words else flag
    flag = flag.rstrip("=").replace("_", "-")
    assert capsys.readouterr().err == f"error: {flag}: the value is empty; write {flag} VALUE, or leave out the flag\n"
    assert not list(recipes.iterdir())


def test_f12_an_empty_word_is_refused(recipes, capsys):
    assert main(["pack", "demo:10", ""]) == 2
    assert "argument 2 is empty" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["run"], ["pretrain"], ["table", "ssl", "--dry-run"]], ids=lambda words: words[0])
@pytest.mark.parametrize("text", ["", " ", "# 5"])
def test_f12_an_empty_value_of_set_is_refused(recipes, capsys, verb, text):
    explain = [] if "ssl" in verb else ["--explain"]
    assert main([*verb, *explain, "--set", f"steps={text}"]) == 2
    assert f"--set steps={text}: the value is empty; write --set steps=VALUE, or steps=null" in capsys.readouterr().err


def test_f12_null_stays_a_value_of_set():
    from finetune_mile.config.resolve import Setting, Speaker, set_settings

    wrong = []
    assert set_settings(["arch=null"], wrong) == {"arch": Setting(None, Speaker("--set arch"))}
    assert not wrong


@pytest.mark.parametrize(
    "flag", ["--fraction", "--steps", "--epochs", "--batch-size", "--lr", "--seed", "--rho", "--k-t"]
)
@pytest.mark.parametrize(
    "text", ["[", "'", "%", "@x", "&a *a", "~", "null", "1:30", "true", "{}", "9" * 5000, "!!int x"]
)
def test_f12_what_is_not_a_number_is_one_sentence(recipes, capsys, flag, text):
    assert main(["run", "--recipe", "demo", "--explain", flag, text]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {flag} {text[:70]}")
    assert len(said.splitlines()) == 1
    assert len(said) < 500


@pytest.mark.parametrize(("text", "number"), [("1e-3", 1e-3), ("0.5", 0.5), (".5", 0.5), ("1_000", 1000), ("010", 10)])
def test_numbers_of_flags_stay_numbers(text, number):
    from finetune_mile.config.flags import parse

    assert json.dumps(parse(["--lr", text]).settings) == json.dumps({"lr": number})


def test_f12_a_sexagesimal_in_a_recipe_is_text(recipes, capsys):
    (recipes / "mine.yaml").write_text("base: demo\nsteps: 1:30\n")
    assert main(["run", "--recipe", "mine.yaml"]) == 2
    assert "steps 1:30: input should be a valid integer" in capsys.readouterr().err
