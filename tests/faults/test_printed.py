"""Names of strangers on a terminal, in a CSV file and on a model card: shown escaped and cut, and never obeyed."""

import csv
import io
import re

import pytest
import torch

from finetune_mile.checkpoints.inspecting import _few
from finetune_mile.core.console import open_console
from finetune_mile.core.problems import LONGEST_LINE, Problem, cell, inert, tell, uncell, warn
from finetune_mile.images.bad_images import BadImages, write_list
from finetune_mile.measures.labels import say_labels
from finetune_mile.measures.predictions import write_per_class
from finetune_mile.pages.annotated import annotate
from finetune_mile.pages.card import model_card
from finetune_mile.training.display import closing_table

RED = "\x1b[31mred\x1b]0;title\x07"
ODD = [RED, "two\nlines", "back\rto the start", "\u202eturned", "\x9b31m", "\udce9.png", "nul\0", "a\u2028b"]


def is_inert(line):
    return len(line) <= LONGEST_LINE and all(c.isprintable() or c == "\u3000" for c in line)


@pytest.mark.parametrize("name", ODD)
def test_control_characters_are_shown_escaped(name):
    shown = inert(name)
    assert is_inert(shown)
    assert shown != name
    assert "\\" in shown
    shown.encode("utf-8")


def test_other_letters_stay_and_long_text_keeps_both_ends():
    assert inert("Katze 猫\u3000ñ 🐈 a\u00a0b") == "Katze 猫\u3000ñ 🐈 a\u00a0b"
    long = inert("start" + "x" * 100_000 + "use --fix")
    assert len(long) == LONGEST_LINE
    assert long.startswith("start")
    assert long.endswith("use --fix")


def test_every_error_and_warning_is_one_inert_line(capsys):
    for name in [*ODD, "n" * 10**6]:
        assert tell(Problem(f"{name} is not read; use another", f"and {name}")) == 2
        warn(f"{name} is skipped")
    lines = capsys.readouterr().err.split("\n")
    assert len(lines) == 3 * (len(ODD) + 1) + 1, "a name makes no line of its own"
    assert all(map(is_inert, lines))
    assert sum(line.startswith("warning: ") for line in lines) == len(ODD) + 1


def test_a_table_shows_names_escaped_and_takes_no_markup_from_a_title():
    from rich.table import Table

    out = io.StringIO()
    console = open_console(file=out, force_terminal=True, width=120)
    table = Table()
    for name in (*ODD[:2], *ODD[3:]):  # rich itself takes a carriage return out
        table.add_row(name)
    console.print(table)
    console.print(closing_table({"accuracy": 50.0}, "mile on folder:a[/b]\x1b[2J", "mile"))
    text = out.getvalue()
    assert "[/b]" in text
    for command in ("\x1b[31m", "\x1b]0", "\x07", "\x9b", "\u202e", "\x1b[2J", "\udce9"):
        assert command not in text
    assert "\\x1b[31mred" in text


def test_the_lines_of_predict():
    labels = [(RED, 0.9, 0.5), ("=cmd|' /C calc'!A0", 0.7, 0.5)]
    table = say_labels("table", "a\nb.jpg", labels, one=0.5, width=10)
    assert table.count("\n") == 1
    assert is_inert(table.rstrip("\n"))
    rows = list(csv.reader(io.StringIO(say_labels("csv", "@x.jpg", labels, one=0.5, width=10))))
    assert [row[:2] for row in rows] == [["'@x.jpg", RED], ["'@x.jpg", "'=cmd|' /C calc'!A0"]]


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path):
    names = ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", "'quoted", "plain", "", "a=b"]
    assert [uncell(cell(name)) for name in names] == names
    write_per_class(tmp_path / "per_class.csv", names, {"taken_for": torch.arange(len(names))})
    with (tmp_path / "per_class.csv").open(newline="") as stream:
        rows = list(csv.reader(stream))[1:]
    assert len(rows) == len(names)
    assert not [text for row in rows for text in row if text.startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_the_list_of_bad_images_comes_back_as_it_was(tmp_path):
    names = ["=1+1.png", "'a.png", "@b.png", "two\nlines.png", "\udce9.png", "c.png"]
    write_list(tmp_path / "bad_images.csv", [("train", name, "=reason") for name in names])
    assert {name for _, name in BadImages(tmp_path / "bad_images.csv", "folder:x").read()} == set(names)


def test_a_model_card_holds_names_as_text():
    names = ["<script>alert(1)</script>", "![x](http://evil.example/x.png)", "```\nimport os", "a|b", "<img onerror=x>"]
    config = {
        "arch": "resnet18", "padding": "torch", "num_classes": len(names), "classes": names, "mean": [0.5] * 3,
        "std": [0.2] * 3, "size": 24, "crop": 1.0, "interpolation": "bilinear", "activation": "softmax",
        "threshold": 0.25, "data": "folder:<b>\n# title", "init": "x`<b>`\n```", "method": "mile", "steps": 5,
        "seed": 0, "fraction": 1.0, "licence": "<a href=x>", "warning": "a\n<script>",
    }  # fmt: skip
    plain = {name: "".join(c for c in name if c.isalnum()) or "x" for name in names}
    honest = config | {"classes": list(plain.values()), "data": "photos", "init": "x", "licence": "MIT", "warning": "a"}
    for form in ("own", "timm", "hf", "onnx", "torch"):
        card = model_card(config, {}, form)
        body = card.split("---\n", 2)[2]
        other = model_card(honest, {}, form).split("---\n", 2)[2]
        assert body.count("```") == other.count("```"), "no name opens or closes a block of code"
        assert len(body.splitlines()) == len(other.splitlines()), "no name makes a line of its own"
        outside = "".join(body.split("```")[::2])
        assert not re.search(r"<script|<img|<a |(?<!\\)\]\(", outside)


def test_a_line_end_in_a_class_name_does_not_break_a_copy(tmp_path):
    annotate(torch.zeros(3, 40, 40, dtype=torch.uint8), [("two\nlines", 0.9, 0.5), (RED, 0.6, 0.5)], tmp_path / "a.jpg")
    assert (tmp_path / "a.jpg").stat().st_size > 0


def test_the_names_of_tensors_are_cut():
    assert len(_few(["x" * 10**6] * 3)) < LONGEST_LINE
    assert is_inert(_few([RED, "a\nb"]))
