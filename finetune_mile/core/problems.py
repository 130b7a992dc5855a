"""The one exception for what a user can mend: bad flags, files, recipes, data."""

from __future__ import annotations

import sys
from collections.abc import Sequence


class Problem(Exception):
    """One clear sentence (or several problems at once) that names the flag or file and the fix.

    The commands print it without a traceback and exit with its code. Anything else that is raised is our own bug.
    """

    code = 2  # the command or its input was wrong

    def __init__(self, *sentences: str) -> None:
        super().__init__("\n".join(sentences))
        self.sentences: Sequence[str] = sentences


class Failed(Problem):
    """The command was right and the run failed all the same, such as one whose loss is not a number any more."""

    code = 1


def tell(problem: Problem) -> int:
    """Print each sentence as an error; the exit code."""
    for sentence in problem.sentences:
        sys.stderr.write(f"error: {sentence}\n")
    return problem.code
