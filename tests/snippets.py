"""The snippets of documents and model cards, and how tests execute them."""

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

from shortcuts import ROOT

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


def lines(text):
    """The commands of a document's bash blocks, as texts: lines joined, split at &&, comments left out."""
    joined = "".join(blocks(text, "bash|sh")).replace("\\\n", " ")
    parts = [part for line in joined.splitlines() for part in re.sub(r"(^|\s)#.*", "", line).split("&&")]
    return [" ".join(part.split()) for part in parts if part.strip()]


def parts_of(line):
    """(what is piped into a command, the command, the file that it writes) of a line."""
    command, _, target = line.partition(" > ")
    before, _, command = command.rpartition(" | ")
    return before, command, target


def run_shell(path, monkeypatch, more=lambda words: (), skip=()):
    """Execute the commands of the bash blocks of a document: {line: (exit code, what it printed)}.

    Ours are executed in this process, launchers and other programs in one of their own. `more` gives the words that are
    added to a command, to make it short; lines that begin with a text of `skip` are left out.
    """
    done = {}
    for line in lines(Path(path).read_text()):
        if line.startswith(tuple(skip)):
            continue
        before, command, target = parts_of(line)
        if before:
            monkeypatch.setattr(sys, "stdin", io.StringIO(subprocess.check_output(before, shell=True, text=True)))
        words = shlex.split(command)
        words += more(words)
        out, code = io.StringIO(), 0
        with redirect_stdout(out):
            if words[0] == "export":
                monkeypatch.setenv(*words[1].split("="))
            elif words[0] == "finetune-mile":
                code = cli.main(words[1:])
            elif words[0] == "python" and words[1].endswith(".py"):
                monkeypatch.setattr(sys, "argv", words[1:])
                monkeypatch.syspath_prepend(str(Path(words[1]).resolve().parent))  # as python does
                runpy.run_path(words[1], run_name="__main__")
            else:
                path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
                env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
                ended = subprocess.run(["env", *words], env=env, capture_output=True, text=True, timeout=300)
                code = ended.returncode
                out.write(ended.stdout + ended.stderr)
        if target:
            Path(target).write_text(out.getvalue())
        done[line] = code, out.getvalue()
    return done
