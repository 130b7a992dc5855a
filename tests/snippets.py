"""The snippets of documents and model cards, and how tests execute them."""

import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

from finetune_mile import cli


def blocks(text, language):
    """The blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def run_python(path):
    """Execute each Python block by itself; returns the names that they leave, one dict for each."""
    left = []
    for block in blocks(Path(path).read_text(), "python"):
        left.append({})
        exec(compile(block, str(path), "exec"), left[-1])
    return left


def run_shell(path, monkeypatch):
    """Execute the lines of the bash blocks of a document in this process: {line: (exit code, what it printed)}."""
    done = {}
    for line in "".join(blocks(Path(path).read_text(), "bash")).splitlines():
        command, _, target = line.partition(" > ")
        before, pipe, command = command.rpartition(" | ")
        if pipe:
            monkeypatch.setattr(sys, "stdin", io.StringIO(subprocess.check_output(before, shell=True, text=True)))
        words = shlex.split(command, comments=True)
        assert words[0] == "finetune-mile", line
        out = io.StringIO()
        with redirect_stdout(out):
            code = cli.main(words[1:])
        if target:
            Path(target).write_text(out.getvalue())
        done[line] = code, out.getvalue()
    return done
