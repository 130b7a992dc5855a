"""Image files that a user names: one file, a folder, or `-` for names on stdin. No torch here."""

from __future__ import annotations

import sys
from pathlib import Path

from finetune_mile.core.problems import Problem
from finetune_mile.images.index import ENDINGS, count_endings, say_unreadable, scan_tree


def names_in(word: str) -> list[str]:
    """The names of the files behind a word of IMAGES."""
    if word == "-":
        text = sys.stdin.read()
        names = [name for name in text.split("\0" if "\0" in text else "\n") if name.strip()]
        if not names:
            raise Problem("IMAGES -: no names on stdin; write one to a line")
        return names
    path = Path(word)
    if not path.is_dir():
        if not path.exists():
            raise Problem(f"IMAGES {word}: there is no such file or folder")
        return [word]
    scan = scan_tree(path, f"IMAGES {word}")
    if len(scan.unread):
        sys.stderr.write(f"warning: {word}: {say_unreadable(count_endings(scan.unread))}\n")
    if not len(scan.names):
        raise Problem(f"IMAGES {word}: no images in this folder or below it ({', '.join(ENDINGS)})")
    return [str(path / name) for name in scan.names]
