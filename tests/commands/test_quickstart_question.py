"""The one question of `quickstart` without a checkpoint, and how its answer is remembered."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from finetune_mile.checkpoints.cards import find_card, folder_of
from finetune_mile.checkpoints.choosing import choose_init


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`choose_init` with these words typed; returns the choice and what was printed."""
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FINETUNE_MILE_CONFIG", str(tmp_path / "config"))
    (tmp_path / "photos").mkdir()

    def run(typed: str, *flags: str, terminal: type[io.StringIO] = Terminal) -> tuple[str, str]:
        printed = terminal()
        monkeypatch.setattr("sys.stdin", terminal(typed))
        monkeypatch.setattr("sys.stderr", printed)
        return choose_init(str(tmp_path / "photos"), download="--download" in flags)[0], printed.getvalue()

    return run


@pytest.mark.parametrize("typed", ["\n", "y\n", "Yes\n"])
def test_the_question_names_size_and_licence_and_yes_is_the_default(choose, typed: str) -> None:
    name, printed = choose(typed)
    assert name == "dinov2-s"
    assert "88 MB" in printed
    assert "Apache-2.0" in printed
    assert printed.count("?") == 1
    assert "[Y/n]" in printed


def test_a_no_is_remembered_and_download_overrides_it(choose, tmp_path: Path) -> None:
    name, printed = choose("n\n")
    assert name == "simclr-demo"
    assert str(tmp_path / "config") in printed
    assert choose("y\n") == ("simclr-demo", "")  # not asked again
    assert choose("", "--download") == ("dinov2-s", "")


def test_a_yes_is_remembered_by_the_file_that_was_downloaded(choose) -> None:
    card = find_card("dinov2-s")
    folder_of(card).mkdir(parents=True)
    assert card.instead is not None
    for file in (card.file, card.instead.name):  # the authors' file, or timm's copy of it
        (folder_of(card) / str(file)).write_bytes(b"")
        assert choose("n\n") == ("dinov2-s", "")
        (folder_of(card) / str(file)).unlink()


def test_without_an_answer_or_a_terminal_nothing_is_remembered(choose, tmp_path: Path) -> None:
    assert choose("n\n", terminal=io.StringIO) == ("simclr-demo", "")
    assert choose("")[0] == "simclr-demo"
    assert choose("what?\n")[0] == "simclr-demo"
    assert not (tmp_path / "config").exists()


def test_a_configuration_folder_that_cannot_be_written_is_no_crash(choose, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a file")
    name, printed = choose("no\n")
    assert name == "simclr-demo"
    assert "could not be kept" in printed
