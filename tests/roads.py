"""How long our roads are: `python -m tests.roads` prints statements, functions and files of the package that run.

run         `finetune-mile run --init moco.pth.tar --data folder:photos`, from main() to the first backward
load        `finetune_mile.load("moco.pth.tar")`
predict     `finetune-mile predict RUN PHOTO`
imitation   the first step of an imitation of MILe, from the end of the backward before it to its own

Imports are left out, and a statement counts once. `python -m tests.roads NAME` also lists the files of one road.
"""

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "finetune_mile"
NAMES = ("run", "load", "predict", "imitation")
PHOTO_SIZE = 48


class Arrived(BaseException):
    """The end of a road; not an Exception, so that nothing on the way catches it."""


class Trace:
    """The lines and functions of the package that run inside a `with` block."""

    def __init__(self):
        self.lines, self.functions, self.importing = defaultdict(set), set(), 0

    def _enter(self, frame, _event, _):
        code = frame.f_code
        if code.co_name == "<module>":
            self.importing += 1
            return self._module
        if self.importing or not code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            return None
        if not code.co_qualname.split(".")[-1].startswith("<"):
            self.functions.add((code.co_filename, code.co_firstlineno, code.co_qualname))
        return self._line

    def _module(self, _frame, event, _):
        self.importing -= event == "return"
        return self._module

    def _line(self, frame, event, _):
        if event == "line":
            self.lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def count(self):
        """Files, functions, statements, and the statements of each file."""
        of_file = {
            Path(file).relative_to(PACKAGE).as_posix(): len(statements(Path(file), lines))
            for file, lines in self.lines.items()
        }
        numbers = {"files": len(of_file), "functions": len(self.functions), "statements": sum(of_file.values())}
        return numbers | {"of_file": of_file}


def statements(path, lines):
    """Where the statements begin that some lines of a file belong to; docstrings are none."""
    first = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if isinstance(body, list) and body else node.end_lineno
            for line in range(node.lineno, end + 1):
                first[line] = max(first.get(line, (0, 0)), (node.lineno, node.col_offset))
    return {first[line] for line in lines if line in first}


def measure(*names):
    """The numbers of some roads, each in a process of its own: what an earlier road has kept would shorten it."""
    environment = {"ACCELERATE_USE_CPU": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--walk", *names],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(names, map(json.loads, done.stdout.splitlines()[-len(names) :]), strict=True))


# ------------------------------------------------------------------------------------ in these processes


def import_others():
    """Import what is slow and not of the package, once for all roads."""
    import accelerate
    import sklearn.linear_model
    import timm
    import torchvision

    return accelerate, sklearn, timm, torchvision


def walk_alone(name):
    """Print the numbers of a road from a copy of this process."""
    copy = os.fork()
    if not copy:
        with tempfile.TemporaryDirectory() as place:
            with contextlib.redirect_stdout(io.StringIO()):
                found = walk(name, Path(place))
            print(json.dumps(found), flush=True)
        os._exit(0)
    if os.waitpid(copy, 0)[1]:
        raise SystemExit(f"the road {name} has no end")


def make_photos(place):
    import torch
    from PIL import Image

    for part, images in (("train", 8), ("val", 4)):
        for label, colour in enumerate(("red", "blue")):
            (place / part / colour).mkdir(parents=True)
            for number in range(images):
                pixels = torch.randint(256, (PHOTO_SIZE, PHOTO_SIZE, 3), dtype=torch.uint8).numpy()
                pixels[..., 2 * label] = 255
                Image.fromarray(pixels).save(place / part / colour / f"{number}.jpg")


def make_checkpoint(path):
    """What MoCo's training script saves."""
    import torch
    import torchvision

    state = torchvision.models.resnet18(weights=None).state_dict()
    tensors = {f"module.encoder_q.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 200, "arch": "resnet18", "state_dict": tensors}, path)


def walk(name, place):
    import torch

    import finetune_mile
    from finetune_mile.cli import main

    torch.set_num_threads(1)
    os.environ["FINETUNE_MILE_CACHE"] = str(place / "cache")
    make_photos(place / "photos")
    make_checkpoint(place / "moco.pth.tar")
    trace, run = Trace(), place / "run"
    common = ["run", "--data", f"folder:{place / 'photos'}", "--batch-size", "4", "--set", "workers=0"]
    common += ["--out", str(run)]
    tiny = ["--init", "none", "--arch", "resnet-demo", "--set", "size=24"]
    if name == "load":
        with trace:
            finetune_mile.load(str(place / "moco.pth.tar"))
    elif name == "predict":
        assert main([*common, *tiny, "--method", "sigmoid", "--steps", "2"]) == 0
        photo = next((place / "photos/val/red").iterdir())
        with trace:
            assert main(["predict", str(run), str(photo)]) == 0
    elif name == "run":
        flags = ["--init", str(place / "moco.pth.tar"), "--set", "size=64"]
        walk_to_gradient(lambda: main([*common, *flags]), trace, lambda phase: True)
    else:
        flags = [*tiny, "--method", "mile", "--steps", "8", "--k-t", "2", "--k-s", "2", "--set", "mile.warmup=0"]
        flags += ["--set", "evaluate.images=0"]
        walk_to_gradient(lambda: main([*common, *flags]), trace, lambda phase: phase.name == "imitation")
    return trace.count()


def walk_to_gradient(command, trace, is_end):
    """Trace a command from the end of one backward to the next one, up to the first whose phase is the end."""
    from accelerate import Accelerator

    backward = Accelerator.backward

    def arrive(self, loss, **options):
        frame = sys._getframe(1)
        while "record" not in frame.f_locals:
            frame = frame.f_back
        if is_end(frame.f_locals["record"].phase):
            sys.settrace(None)  # what is undone on the way back is not a part of the road
            while frame is not None:
                frame.f_trace, frame = None, frame.f_back
            raise Arrived
        backward(self, loss, **options)
        trace.lines.clear()
        trace.functions.clear()

    Accelerator.backward = arrive
    with contextlib.suppress(Arrived), trace:
        raise SystemExit(f"the command ended with {command()} before a gradient")


def main(words):
    if words[:1] == ["--walk"]:
        import_others()
        for name in words[1:]:
            walk_alone(name)
        return
    for name, found in measure(*(words or NAMES)).items():
        units = "".join(f"{found[unit]:>7,} {unit}" for unit in ("statements", "functions", "files"))
        print(f"{name:<10}{units}")
        for file, number in sorted(found["of_file"].items(), key=lambda each: -each[1]) if words else ():
            print(f"{number:>16,} {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
