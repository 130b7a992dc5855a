"""The sentences of every Problem, read where they are written, folder by folder. Other tests ask what they name."""

import ast
import json
import re

import english
import pytest
from shortcuts import ROOT

PACKAGE = ROOT / "finetune_mile"
FOLDERS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")})
MOST_WORDS = 45  # of all that one Problem says; what it lists is one word
# They have a sentence that names nothing: its caller does, or there is no flag or file to name.
UNNAMED = {
    "api.py", "checkpoints/adapters/libraries.py", "learning/loop.py",
    "networks/any_size.py", "verbs/weights.py",
}  # fmt: skip
RIDDLES = r"\b(wanted|goes on|what is this|where is it|a folder a class|lies (in|outside)|is meant|looked at)\b"


def said(node):
    """The words of a string as far as they are written there; VALUE stands for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return said(node.left) + said(node.right)
    return "VALUE"


def sentences(folder):
    """Where a Problem is made, and what it says."""
    place = PACKAGE / folder
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if name in ("Problem", "Failed", "Missing", "Refused"):
                for words in map(said, node.args):
                    if words != "VALUE" and not words.startswith("VALUE" * 2):
                        # the readers say Refused, and their caller puts the file before it
                        yield path.relative_to(PACKAGE).as_posix(), "VALUE " * (name == "Refused") + words


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_problem_names_something_and_is_short_and_plain(folder):
    for where, words in sentences(folder):
        named = re.search(r"VALUE|--\w|`|\w[._]\w|: ", words) or where in UNNAMED
        assert named, f"{where} names no flag, file or value: {words}"
        assert len(words.split()) <= MOST_WORDS, f"{where} has {len(words.split())} words: {words}"
        assert not re.search(RIDDLES, words), f"{where} is no plain English: {words}"


def test_most_sentences_are_seen():
    assert sum(1 for folder in FOLDERS for _ in sentences(folder)) > 300


def test_sentences_do_not_become_longer():
    """`python -m tests.english` lists them; `--lower` writes what is left. What is listed may only become less."""
    left = json.loads(english.LEFT.read_text())
    grown = {
        name: (number, left.get(name, 0)) for name, number in english.counts().items() if number > left.get(name, 0)
    }
    assert grown == {}, "shorten these sentences: python -m tests.english FILE"
    assert sum(left.values()) < 200


def test_what_is_long_or_unplain_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        f"# A\n\nOne. Long {'word ' * 25}`code`.\n\n| a | {'cell ' * 30}|\n\n- It goes on.\n\n```\n{'x ' * 40}\n```\n"
    )
    assert [what for what, _ in english.found(page)] == ["27 words", "'goes on'", "30 words"]
    code = tmp_path / "code.py"
    code.write_text(f'"""{"doc " * 30}"""\nraise Problem(f"{{name}} lies outside. {"long " * 27}")\n')
    assert [what for what, _ in english.found(code)] == ["30 words", "'lies'"]
    code.write_text(f'print(f"{{name}} {"Long " + "long " * 27}")\n')
    assert [what for what, _ in english.found(code)] == ["29 words"]
