"""What a change of structure must not move: `python -m tests.golden record` before it, `check` after it.

Compared on one machine, to the bit: the final weights of every mode of training in one and in two processes, every
resolved setting of every recipe with who set it, and the load report of every shared checkpoint. The record is kept in
.golden.json, which is not committed: another processor or another torch rounds differently.

What must hold everywhere is in tests/golden_numbers.json, with a tolerance: `python -m tests.golden numbers` writes it,
tests/commands/test_processes.py compares it. `flags` writes golden_flags.json.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/commands"), str(ROOT / "tests/checkpoints")]

RECORD = ROOT / ".golden.json"
NUMBERS = ROOT / "tests/golden_numbers.json"
FLAGS = ROOT / "tests/golden_flags.json"
LOSSES = 20
SCORES = ("accuracy", "top5", "f1@0.25", "lrap", "coverage@0.25")
FRACTIONS = ("0.01", "0.1", "1.0")
METHODS = ("softmax", "sigmoid", "mile", "noisy-student", "self-distill", "irm", "rex")


def flags_of_every_verb():
    """The flags that each command lists in its help."""
    from finetune_mile.cli import VERBS, main

    commands = [[verb] for verb in VERBS] + [
        ["weights", verb] for verb in ("ls", "show", "check", "convert", "add", "verify")
    ]
    listed = {}
    for words in commands:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*words, "--help-all" if words == ["run"] else "--help"])
        listed[" ".join(words)] = sorted(set(re.findall(r"^ +(?:-h, )?(--[a-z][a-z-]*)", out.getvalue(), re.M)))
    return listed


def play_modes(folder, processes):
    """Train every mode into folder/MODE, in one or two processes."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE")}
    env |= {"OMP_NUM_THREADS": "1", "FINETUNE_MILE_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(ROOT / "tests/commands/modes.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


def weights_hash(run):
    """SHA-256 of the exported tensors; the file's own bytes hold more than them."""
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(run / "export/model.safetensors").items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def numbers_of(run):
    """The first losses and the final scores of a run."""
    from shortcuts import losses

    results = json.loads((run / "results.json").read_text())
    return {"losses": losses(run)[:LOSSES], "scores": {key: results[key] for key in SCORES if key in results}}


def output_of(main, *words):
    """What a command prints as JSON, or its exit code and its complaint; a crash is pinned as one."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(words))
    except RuntimeError as error:
        return {"raises": repr(error)}
    said = json.loads(out.getvalue()) if code == 0 else {"exit": code, "says": err.getvalue()}
    return json.loads(json.dumps(said).replace(str(ROOT), "ROOT"))


def resolved():
    """Every setting of every recipe, fraction and method, with who set it."""
    from finetune_mile.config.resolve import NO_RUNS
    from finetune_mile.run import main

    os.environ["IMAGENET_DIR"] = str(ROOT / "docs")  # any folder: nothing is read
    names = [p.relative_to(ROOT / "recipes") for p in sorted((ROOT / "recipes").rglob("*.yaml"))]
    for name in (n.with_suffix("") for n in names if n.parts[0] not in NO_RUNS):
        for fraction in FRACTIONS:
            for method in METHODS:
                words = ["--recipe", str(name), "--fraction", fraction, "--method", method]
                yield " ".join(words), output_of(main, *words, "--explain", "--json")
    for flags in (["--variant", "published"], ["--rho", "auto"], ["--init", "byol"], ["--epochs", "3", "--lr", "1"]):
        yield " ".join(flags), output_of(main, *flags, "--explain", "--json")


def load_reports():
    """What becomes of every tensor of every shared checkpoint."""
    from test_parity import FOLDERS, SHARED, unpacked

    from finetune_mile.cli import main

    edge = sorted((SHARED / "edge_cases").iterdir())
    samples = sorted(path.stem for path in (SHARED / "upstream").glob("*.json"))
    with tempfile.TemporaryDirectory() as place:
        files = {name: unpacked(name, _made(Path(place) / name)) for name in FOLDERS}
        files |= {f"edge/{path.name}": path for path in edge}
        for name in samples:
            build = [sys.executable, str(SHARED / "upstream/build.py"), name, str(_made(Path(place) / name))]
            files[f"upstream/{name}"] = Path(subprocess.check_output(build, text=True).split()[-1])
        for name, path in files.items():
            report = json.dumps(output_of(main, "weights", "check", str(path), "--json"))
            yield name, json.loads(report.replace(str(path.parent), "DIR"))


def _made(folder):
    folder.mkdir(parents=True)
    return folder


def everything():
    pins = {}
    with tempfile.TemporaryDirectory() as place:
        for processes in (1, 2):
            folder = Path(place) / str(processes)
            play_modes(folder, processes)
            runs = sorted(path.parent for path in folder.rglob("results.json"))
            pins |= {f"weights, {processes}, {run.relative_to(folder)}": weights_hash(run) for run in runs}
    pins |= {f"resolved, {words}": value for words, value in resolved()}
    pins |= {f"load, {name}": value for name, value in load_reports()}
    return pins


def differences(was, now, path=""):
    """The parts of two pins that are not equal, one line each."""
    if isinstance(was, dict) and isinstance(now, dict):
        return [line for key in was | now for line in differences(was.get(key), now.get(key), f"{path}/{key}")]
    return [] if was == now else [f"{path}: was {str(was)[:100]}, is {str(now)[:100]}"]


def main(verb):
    if verb == "numbers":
        with tempfile.TemporaryDirectory() as place:
            play_modes(Path(place), 1)
            runs = sorted(path.parent for path in Path(place).glob("*/results.json"))
            NUMBERS.write_text(json.dumps({run.name: numbers_of(run) for run in runs}, indent=1) + "\n")
        return 0
    if verb == "flags":
        FLAGS.write_text(json.dumps(flags_of_every_verb(), indent=1) + "\n")
        return 0
    pins = everything()
    if verb == "record":
        RECORD.write_text(json.dumps(pins))
        print(f"{len(pins)} pins recorded")
        return 0
    before = json.loads(RECORD.read_text())
    moved = [key for key in before | pins if before.get(key) != pins.get(key)]
    for key in moved:
        print(f"MOVED {key}\n" + "".join(f"  {line}\n" for line in differences(before.get(key), pins.get(key))[:5]))
    print(f"{len(pins) - len(moved)} of {len(before)} pins hold")
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
