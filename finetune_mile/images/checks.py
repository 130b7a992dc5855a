"""What can be said of --split and truth before any work. No torch here."""

from __future__ import annotations

from pathlib import Path

from finetune_mile.core.problems import Problem


def check_truth(spec: str) -> None:
    """Refuse a truth that is misspelt or names files that are not there."""
    kind, _, where = spec.partition(":")
    parts = where.split(",")
    if kind == "counts":
        try:
            if len(parts) != 3 or not 0 < float(parts[2]) <= 1:
                raise ValueError
        except ValueError as error:
            raise Problem(f"truth {spec}: write counts:FILE.npy,INDEX.csv,SHARE with a share up to 1") from error
    elif not ((kind == "real" and not where) or (kind == "csv" and where)):
        raise Problem(f"truth {spec}: write real, csv:FILE, or counts:FILE.npy,INDEX.csv,0.1")
    for file in parts[:2] if kind == "counts" else [where] if kind == "csv" else []:
        if not Path(file).is_file():
            raise Problem(f"truth {spec}: there is no file {file}")


def check_split(split: str) -> None:
    """Refuse a list that is not there."""
    if not Path(split).is_file():
        raise Problem(f"--split {split}: there is no such file; give a list of names, or a run's split.json")
