"""A run that notes where its processes have the same batch-norm statistics: `buffers.py FLAGS --out RUN`."""

import json
import sys
from pathlib import Path

from accelerate.utils import gather_object

from finetune_mile.learning.loop import Loop
from finetune_mile.learning.roles import Roles
from finetune_mile.run import main
from finetune_mile.training.processes import Device

found = {"evaluated": [], "copied": [], "differed": False}
outputs, leave, step = Device.outputs, Roles.leave, Loop._step


def the_same(network):
    sums = gather_object([[float(buffer.double().sum()) for buffer in network.buffers()]])
    assert sums[0]
    return sums[0] == sums[1]


def watched_outputs(device, network, *words, **more):
    found["evaluated"].append(the_same(network))
    return outputs(device, network, *words, **more)


def watched_leave(roles, phase):
    leave(roles, phase)
    found["copied"].append(the_same(roles.learner) and the_same(roles.teacher))


def watched_step(loop, *words):
    step(loop, *words)
    found["differed"] = found["differed"] or not the_same(loop.roles.learner)


Device.outputs, Roles.leave, Loop._step = watched_outputs, watched_leave, watched_step
code = main(sys.argv[1:])
(Path(sys.argv[-1]) / "buffers.json").write_text(json.dumps(found))
sys.exit(code)
