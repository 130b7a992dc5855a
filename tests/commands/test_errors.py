"""Bad input: one clear sentence, exit code 2, well under a second, nothing written."""

import json
import signal
import subprocess
import sys

import pytest
from golden import FLAGS, flags_of_every_verb
from shortcuts import ROOT

import finetune_mile
from finetune_mile import cli
from finetune_mile.cli import main
from finetune_mile.config.weights_flags import EXAMPLES
from finetune_mile.core.files import shipped
from finetune_mile.core.problems import Failed
from finetune_mile.run import main as run_main

CASES = {
    "unknown flag": (["--fractoin", "0.1"], "did you mean --fraction?"),
    "a flag of another tool": (["--pretrained", "x"], "did you mean --init?"),
    "a short flag of another tool": (["--bs", "8"], "did you mean --batch-size?"),
    "a setting that has no flag": (["--weight-decay", "0.1"], "did you mean --set optimizer.weight_decay=?"),
    "another setting that has no flag": (["--num-workers", "3"], "did you mean --set workers=?"),
    "several at once": (["--fraction", "2", "--k-t", "0", "--seed", "x"], "--fraction 2"),
    "fraction": (["--fraction", "2"], "less than or equal to 1"),
    "k_t": (["--k-t", "0"], "--k-t 0"),
    "underscores are dashes": (["--k_t", "0"], "--k-t 0"),
    "method": (["--method", "milk"], "--method milk"),
    "k_t without mile": (["--method", "sigmoid", "--k-t", "5"], "belongs to --method mile"),
    "missing directory": (["--data", "folder:nowhere"], "no directory 'nowhere'"),
    "bare missing directory": (["--data", "nowhere"], "no directory 'nowhere'"),
    "unknown source": (["--data", "foldr:x"], "did you mean folder:?"),
    "unknown card": (["--init", "simclr-dmo", "--data", "demo"], "did you mean simclr-demo"),
    "unknown key": (["--set", "optimizer.momentun=0.8"], "did you mean momentum?"),
    "no value": (["--set", "optimizer.momentum"], "write KEY=VALUE"),
    "no teacher": (["--method", "distill"], "needs --teacher"),
    "missing recipe": (["--recipe", "demoo"], "did you mean demo?"),
    "steps and epochs": (["--steps", "5", "--epochs", "1"], "give one of them"),
    "a word too many": (["demo"], "unexpected argument 'demo'"),
    "resume with a setting": (["--resume", "somewhere", "--seed", "1"], "takes no other setting"),
    "resume nothing": (["--resume", "somewhere"], "not a run folder"),
}


def run(*flags, cwd):
    command = [sys.executable, str(ROOT / "finetune_mile/run.py"), *flags]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence(case, tmp_path, monkeypatch, capsys):
    flags, sentence = CASES[case]
    monkeypatch.chdir(tmp_path)
    assert run_main(flags) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert all(line.startswith("error: ") for line in told.splitlines())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["unknown flag", "k_t", "missing directory"])
def test_bad_input_ends_the_command(case, tmp_path):
    flags, sentence = CASES[case]
    done = run(*flags, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_check_knows_its_own_flags_and_those_of_a_run(capsys):
    """`check --worker 3` was answered with --keep, a flag of `run`."""
    for flag, near in (("--worker", "--workers"), ("--fractoin", "--fraction"), ("--num_workers", "--set workers=")):
        assert main(["check", "--data", "demo:40", flag, "3"]) == 2
        assert f"unknown flag; did you mean {near}?" in capsys.readouterr().err


def test_a_flag_that_is_almost_a_name_of_another_tool(capsys):
    """`run --worker 3` was answered with --keep."""
    for flag, near in (
        ("--worker", "--set workers="),
        ("--numworkers", "--set workers="),
        ("--fractoin", "--fraction"),
    ):
        assert main(["run", flag, "3"]) == 2
        assert f"{flag}: unknown flag; did you mean {near}?" in capsys.readouterr().err


def test_a_key_with_a_dot_is_told_apart_from_a_setting(tmp_path, monkeypatch, capsys):
    """A file that has `optimizer.lr:` was answered with "--lr: unknown key" where the command has --lr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: finetune\noptimizer.lr: 0.3\n")
    unknown = "error: recipe mine.yaml: 'optimizer.lr': unknown key; write a block: optimizer: {lr: VALUE}\n"
    for flags in ([], ["--lr", "0.1"], ["--set", "optimizer.lr=0.1"]):
        assert main(["run", "--recipe", "mine.yaml", "--data", "demo:40", *flags, "--explain", "--json"]) == 2
        assert capsys.readouterr().err == unknown
    assert main(["run", "--recipe", "mine.yaml", "--data", "demo:40", "--lr", "-1", "--explain", "--json"]) == 2
    assert sorted(capsys.readouterr().err.splitlines(True))[1] == unknown
    assert main(["run", "--data", "demo:40", "--set", "optimizer={a.b: 1}", "--explain", "--json"]) == 2
    assert "error: --set optimizer: unknown key; write a block: optimizer.a: {b: VALUE}" in capsys.readouterr().err


def test_all_problems_are_told_at_once(tmp_path):
    done = run("--fraction", "2", "--k-t", "0", "--lr", "-1", "--set", "nonsense=1", cwd=tmp_path)
    assert len(done.stderr.splitlines()) == 4


@pytest.mark.parametrize("text", ["method: mile\nfraction: 2\n", "just a string", "a: [1,\n", ""])
def test_a_wrong_recipe_is_told_by_explain(text, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    done = run("--recipe", "mine.yaml", "--explain", cwd=tmp_path)
    assert done.returncode == 2
    assert "mine.yaml" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flags", [["--help"], ["--fraction", "2"], ["--data", "folder:nowhere"]])
def test_help_and_errors_do_not_import_torch(flags):
    code = f"""
import contextlib, sys
from finetune_mile import run
with contextlib.suppress(SystemExit):
    run.main({flags!r})
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_explain_json_gives_every_setting_and_who_set_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IMAGENET_DIR", str(tmp_path))  # empty: neither data nor weights are needed
    assert main(["run", "--init", "simclrv2-sk1", "--fraction", "0.01", "--lr", "0.3", "--explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"] == "simclrv2-large.yaml"
    assert found["settings"]["optimizer.lr"] == {"value": 0.3, "set_by": "--lr"}
    assert found["settings"]["mile.k_t"]["set_by"] == "base any.yaml, fractions 0.01"
    assert found["settings"]["mile.k_t"]["source"].startswith("our choice")
    assert found["settings"]["compile"] == {"value": False, "set_by": "schema"}
    assert main(["run", "--json"]) == 2
    assert "--json belongs to --explain" in capsys.readouterr().err


VERBS = {
    "weights shw": "error: finetune-mile weights shw: unknown; did you mean show?",
    "weights ls --jsn": "error: --jsn: unknown flag; did you mean --json?",
    "weights show x --arch=": "error: --arch: the value is empty; write --arch VALUE, or leave out the flag",
    "weights": "error: the following arguments are required: ls | show | check | convert | add | verify "
    "(--help lists the flags)",
    "train --fraction 200%": "error: --fraction 2.0: input should be less than or equal to 1",
    "table": "error: the name of a table is missing; give one of ablations, auto, imagenet, mini-semi, mini-ssl, "
    "multi-mnist, ood, semi, ssl (`finetune-mile table --list` has their titles)",
    "tabel ssl": "error: tabel: unknown verb; did you mean table?",
    "table ssl --formt csv": "error: --formt: unknown flag; did you mean --format?",
    "table ssl --format tex": "error: --format tex: unknown; did you mean latex?",
    "pack a b --sise 3": "error: --sise: unknown flag; did you mean --size?",
    "check --data demo more": "error: unexpected argument 'more'. Settings are flags (see --help).",
}


@pytest.mark.parametrize("words", VERBS)
def test_every_verb_tells_a_problem_in_the_same_way(words, capsys):
    assert main(words.split()) == 2
    assert capsys.readouterr().err == VERBS[words] + "\n"


def test_a_check_that_fails_has_another_exit_code_than_a_wrong_command(monkeypatch, capsys):
    def fail(_):
        raise Failed("the disk is full")

    monkeypatch.setattr("finetune_mile.verbs.weights._ls", fail)
    assert main(["weights", "ls"]) == 1
    assert capsys.readouterr().err == "error: the disk is full\n"


def test_the_flags_of_every_verb_are_these():
    """A flag more or less is a decision: `python -m tests.golden flags` writes the list anew."""
    assert flags_of_every_verb() == json.loads(FLAGS.read_text())


def test_names_of_other_tools_and_percent_are_understood(tmp_path, capsys):
    words = ["train", "--data", "demo", "--fraction", "10 %", "--learning-rate", "0.3", "--image-size", "20"]
    assert main([*words, "--explain", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert [settings[key]["value"] for key in ("fraction", "optimizer.lr", "size")] == [0.1, 0.3, 20]


def test_recipes_are_listed_shown_and_copied(tmp_path, capsys):
    assert main(["recipes", "ls"]) == 0
    listed = capsys.readouterr().out
    assert "\nfinetune                    Your own photos in class folders" in listed
    assert main(["recipes", "cp", "ssl/mocov2", str(tmp_path / "mine.yaml")]) == 0
    assert main(["run", "--recipe", str(tmp_path / "mine.yaml"), "--data", "demo", "--explain", "--json"]) == 0
    capsys.readouterr()
    assert main(["recipes", "cp", "finetune", str(tmp_path / "mine.yaml")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["recipes", "show", "finetun"]) == 2
    assert "did you mean finetune?" in capsys.readouterr().err
    assert main(["recipes", "cp", "finetune"]) == 2
    assert "write: finetune-mile recipes cp NAME FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "machines", "processes"), [("one-gpu", 1, 1), ("eight-gpus", 1, 8), ("two-nodes", 2, 16)]
)
def test_accelerates_configurations_are_read_by_accelerate(name, machines, processes):
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(shipped("recipes") / f"launch/{name}.yaml"))
    assert (found.num_machines, found.num_processes, found.mixed_precision) == (machines, processes, "no")


@pytest.mark.parametrize("verb", [*cli.VERBS, *(f"weights {verb}" for verb in EXAMPLES)])
def test_the_help_of_a_verb_fits_a_screen_and_has_an_example(verb, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help"])
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 55
    assert "example" in said


def test_the_help_of_no_verb_waits_for_slow_modules():
    """numpy and the network's modules were half of the processor time of --help."""
    code = f"""
import contextlib, sys
from finetune_mile.cli import main
for verb in {[*cli.VERBS]!r}:
    with contextlib.suppress(SystemExit):
        main([verb, "--help"])
    slow = {{"torch", "numpy", "http.client", "rich.progress", "jinja2", "filelock"}} & sys.modules.keys()
    assert not slow, (verb, slow)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version_and_tables_are_listed(capsys):
    assert main(["--version"]) == 0
    assert main(["table", "--list"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"finetune-mile {finetune_mile.__version__}\n")
    assert "\nssl           Self-supervised fine-tuning on ImageNet\n" in said


INTERRUPTED = """
import builtins, os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
real = builtins.__import__
def hook(name, *rest, **more):
    if name == "finetune_mile.config.flags":
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **more)
builtins.__import__ = hook
sys.argv = ["finetune_mile/run.py"]
runpy.run_path("finetune_mile/run.py", run_name="__main__")
"""


def test_f20_ctrl_c_at_the_start_of_the_main_command_is_no_traceback(monkeypatch):
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune_mile.run.parse", interrupted)
    assert run_main([]) == 128 + signal.SIGINT
