"""What a user reads and types next: hints, warnings, progress, and commands that can be pasted."""

import ast
import re
import shlex
import signal
from types import SimpleNamespace

import pytest
from shortcuts import ROOT, tinted_photos

import finetune_mile
from finetune_mile.cli import main
from finetune_mile.training.folder import RunFolder
from finetune_mile.training.monitor import recorded
from finetune_mile.training.processes import Signals, Stopped

FAST = ["--set", "size=24", "--set", "workers=0", "--steps", "4", "--batch-size", "8", "--set", "evaluate.labels=false"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder with a space in its name."""
    root = tmp_path_factory.mktemp("said") / "messy photos"
    tinted_photos(root, noise=40)
    return root


def test_the_list_of_recipes_says_which_flags_choose_scratch(photos, capsys):
    assert main(["recipes", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.endswith((".", "?"))] == [], "cut off within a sentence"
    line = next(line for line in lines if line.startswith("scratch"))
    assert {"--init none", "--arch"} <= set(re.findall(r"--init none|--arch", line)), line
    assert main(["run", "--data", str(photos), "--init", "none", "--arch", "resnet-demo", "--explain"]) == 0
    assert "recipe  scratch.yaml" in capsys.readouterr().out


@pytest.mark.parametrize("trunk", ["all", "frozen"])
def test_the_warning_of_a_tiny_network_counts_its_backbone(photos, capsys, trunk):
    assert main(["run", "--data", str(photos), "--init", "simclr-demo", "--trunk", trunk, "--explain"]) == 0
    (number,) = re.findall(r"is tiny \(([\d,]+) parameters\)", capsys.readouterr().out)
    assert int(number.replace(",", "")) > 300_000


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        *((flag, "--trunk frozen") for flag in ("--freeze", "--frozen", "--linear-probe", "--freeze_backbone")),
        *((flag, "--init") for flag in ("--checkpoint", "--weights", "--pretrained")),
        *((flag, "--size") for flag in ("--img-size", "--resolution", "--input-size")),
    ],
)
def test_flags_of_other_tools_are_known(capsys, typed, hint):
    assert main(["run", typed, "x"]) == 2
    assert f"did you mean {hint}?" in capsys.readouterr().err


def test_tab_completion_shows_what_there_is_and_no_helpers():
    shown = {name for name in dir(finetune_mile) if not name.startswith("__")}
    assert shown == {name for name in finetune_mile.__all__ if not name.startswith("__")}
    assert {"__version__", "__doc__", "__file__"} <= set(dir(finetune_mile))


def test_readme_links_every_page_and_names_what_others_do_not_find():
    readme = (ROOT / "README.md").read_text()
    index = (ROOT / "docs/index.md").read_text()  # test_site.py: it has every page
    linked = set(re.findall(r"\]\(([^)#]+)", readme))
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")}
    assert pages - linked - {f"docs/{page}" for page in re.findall(r"\]\(([^)#]+)", index)} == set()
    assert [link for link in linked if not link.startswith("http") and not (ROOT / link).exists()] == []
    first = readme.split("```")[0].lower()
    for words in ("frozen features", "wrong labels", "several labels", "vision transformers"):
        assert words in first, "before the first command"


# ------------------------------------------------------------------------------------ commands that can be pasted

FLAG = r".+--(resume|recipe|init)|(with|use|it:|it|a|by|backbone:) --data"  # not: `--data X: what is wrong`
PASTED = re.compile(rf"(finetune-mile [a-z]+( (--)?[a-z][a-z-]*)*|{FLAG}) '?([a-z]+:)?$|\b[Ww]rite [a-z]+:$", re.DOTALL)
NAMES = ("verb", "options.verb", "name", "args.name", "card.name", "model.card.name")  # of commands and cards: one word


def bare_values(path):
    """Values that an f-string puts behind a printed command, and not in quotes."""
    for text in ast.walk(ast.parse(path.read_text())):
        if not isinstance(text, ast.JoinedStr):
            continue
        for before, value in zip(text.values, text.values[1:], strict=False):
            if isinstance(before, ast.Constant) and isinstance(value, ast.FormattedValue):
                words = ast.unparse(value.value)
                quoted = words.startswith("shlex.") or value.conversion == ord("r")
                if PASTED.search(before.value) and not quoted and words not in NAMES:
                    yield f"{path}:{value.lineno}: {before.value[-40:]}{{{words}}}"


def test_every_path_in_a_printed_command_is_quoted():
    files = (ROOT / "finetune_mile").rglob("*.py")
    assert [line for path in files for line in bare_values(path)] == []


def test_the_commands_that_a_run_prints_can_be_pasted(photos, tmp_path, capsys, stop_at):
    """`finetune-mile check --data messy photos` has one word too many."""
    out = tmp_path / "my run"
    flags = ["--data", f"folder:{photos}", "--init", "simclr-demo", *FAST, "--method", "softmax"]
    command = ["run", *flags, "--out", str(out)]
    stop_at(2)
    assert main(command) == 143
    stop_at(None)
    said = "".join(capsys.readouterr())
    again = shlex.split(said.split("continue with: ")[1].splitlines()[0])
    assert again == ["finetune-mile", "run", "--resume", str(out)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"--resume {shlex.quote(str(out))}" in said
    assert main(again[1:]) == 0
    said = "".join(capsys.readouterr())
    printed = re.findall(r"finetune-mile (?:doctor|predict|probe) [^()\n]+", said)
    assert printed
    for line in printed:
        words = shlex.split(line)
        assert {f"folder:{photos}", str(out)} & set(words), line


# ------------------------------------------------------------------------------------ a plan, results, progress


def test_a_plan_does_not_warn_of_the_default_recipes_own_schedule(photos, capsys):
    """`k_t is 6 epochs of your labelled images ... lower --k-t` was about a value that nobody had set."""
    words = ["check", "--data", str(photos), "--init", "simclr-demo", "--set", "size=24"]
    assert main(words) == 0
    assert "k_t is" not in capsys.readouterr().out
    assert main([*words, "--k-t", "90", "--k-s", "5"]) == 0
    assert "k_t is" in capsys.readouterr().out


@pytest.mark.parametrize(("method", "shown"), [("wan", False), ("mile", True)])
def test_labels_per_image_are_shown_where_an_image_may_have_several(photos, tmp_path, capsys, method, shown):
    import json

    flags = ["--data", str(photos), "--init", "simclr-demo", "--trunk", "frozen", *FAST, "--steps", "20"]
    assert main(["run", *flags, "--method", method, "--out", str(tmp_path / "run")]) == 0
    assert ("coverage@0.25" in capsys.readouterr().out) is shown
    assert ("coverage@0.25" in (tmp_path / "run/report.html").read_text()) is shown
    assert "coverage@0.25" in json.loads((tmp_path / "run/results.json").read_text())


def test_the_time_left_of_a_trial_has_the_run_in_it(monkeypatch, capsys):
    from finetune_mile.training import display

    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    for after, left in ((0, "50 s left"), (20, "70 s left in all")):
        shown = display.Display(100, visible=True, after=after)
        shown.begin(0)
        now[0] += 50
        shown.step(50, "imitation", 1, 9.0, 5.5)
        said = capsys.readouterr().err
        assert left in said
        assert "imitation loss 5.5" in said, "losses of other phases have other targets"


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys):
    from finetune_mile.core import console

    with console.progress("features", 256) as advance:
        advance(10)
    assert capsys.readouterr().err == "", "a short one needs no line"
    monkeypatch.setattr(console, "PLAIN_SECONDS", -1.0)
    with console.progress("features", 256) as advance:
        advance(10)
        advance(30)
    assert "features: 40 of 256" in capsys.readouterr().err
    with console.progress("features", 256, quiet=True) as advance:
        advance(10)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("processes", "end"), [(1, ""), (2, "   (with the same launcher, in 2 processes)")])
def test_a_stopped_run_of_several_processes_is_not_continued_in_one(processes, end, tmp_path, capsys):
    """`finetune-mile run` alone would train on one GPU of eight."""
    folder = RunFolder.create(tmp_path / "run", "seed: 0\n", overwrite=False)
    accelerator = SimpleNamespace(num_processes=processes, is_main_process=True, print=print)
    device = SimpleNamespace(accelerator=accelerator, signals=Signals())
    with recorded(device, folder, keep_checkpoints=True) as ending:
        raise Stopped(signal.SIGTERM)
    assert ending.code == 143
    assert capsys.readouterr().out == f"stopped; continue with: finetune-mile run --resume {folder.path}{end}\n"
