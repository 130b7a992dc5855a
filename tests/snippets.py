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
    """The blocks of a document in a language, a regular expression; empty: those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [block for name, block in found if re.fullmatch(language, name)]


def run_python(path):
    """Execute each Python block by itself; returns the names that they leave, one dict for each."""
    left = []
    for block in blocks(Path(path).read_text(), "python"):
        left.append({})
        exec(compile(block, str(path), "exec"), left[-1])
    return left


def commands(text):
    """The commands of a document's bash blocks, as lists of words: lines joined, comments and redirections left out."""
    found = []
    for block in blocks(text, "bash|sh"):
        for line in block.replace("\\\n", " ").splitlines():
            reader = shlex.shlex(line, posix=True, punctuation_chars="|&>")
            reader.whitespace_split = True
            words = [*reader, "&&"]
            while "&&" in words:
                part, words = words[: (end := words.index("&&"))], words[end + 1 :]
                found += [part[part.index("|") + 1 :] if "|" in part else part]
    return [words[: words.index(">")] if ">" in words else words for words in found if words]


def run_shell(path, monkeypatch, more=None, skip=()):
    """Execute the lines of the bash blocks of a document in this process: {line: (exit code, what it printed)}.

    `more` has flags for each verb that are added, to make it short; lines that contain a text of `skip` are left out.
    """
    done = {}
    for line in "".join(blocks(Path(path).read_text(), "bash|sh")).splitlines():
        if any(text in line for text in skip):
            continue
        command, _, target = line.partition(" > ")
        before, pipe, command = command.rpartition(" | ")
        if pipe:
            monkeypatch.setattr(sys, "stdin", io.StringIO(subprocess.check_output(before, shell=True, text=True)))
        words = shlex.split(command, comments=True)
        assert words[0] == "finetune-mile", line
        out = io.StringIO()
        with redirect_stdout(out):
            code = cli.main([*words[1:], *(() if "--resume" in words else (more or {}).get(words[1], ()))])
        if target:
            Path(target).write_text(out.getvalue())
        done[line] = code, out.getvalue()
    return done
