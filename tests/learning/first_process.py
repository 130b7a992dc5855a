"""What each of two processes gets of work that the first one does; started by `test_processes_agree.py`."""

import json
import os
import sys
from pathlib import Path

from finetune_mile.core.problems import Failed, Problem
from finetune_mile.training.processes import from_first


def broken():
    raise Failed("one", "two")


found = {"value": from_first(lambda: {"rank": os.environ["RANK"]})}
try:
    from_first(broken)
except Problem as problem:
    found |= {"kind": type(problem).__name__, "code": problem.code, "sentences": list(problem.sentences)}
found["after"] = from_first(lambda: os.environ["RANK"])  # the processes still speak of the same
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(found))
