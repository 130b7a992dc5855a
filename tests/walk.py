"""The two paths that a newcomer follows, measured: `python -m tests.walk` prints the files of each in order of entry.

One checkpoint through `finetune_mile.load`, and one batch from the command line to the first `accelerator.backward`.
Imports are not part of a walk: only functions that run count. `readers/` and `adapters/` are one stop each, since a
reader of the path does not open every format.
"""

import os
import sys
import tempfile
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PACKAGE = ROOT / "finetune_mile"
ONE_STOP = ("checkpoints/readers", "checkpoints/adapters")
PHOTO_SIZE = 48


class Arrived(BaseException):
    """The end of a walk; not an Exception, so that nothing on the way catches it."""


@dataclass
class Walk:
    """The files of finetune_mile whose functions ran, and how often execution went from one to another."""

    files: list[str] = field(default_factory=list)
    switches: int = 0

    @property
    def stops(self) -> list[str]:
        folders = (next((f"{one}/" for one in ONE_STOP if file.startswith(one)), file) for file in self.files)
        return list(dict.fromkeys(folders))

    def lines(self, stop: str) -> int:
        files = [file for file in self.files if file == stop or (stop.endswith("/") and file.startswith(stop))]
        return sum(len((PACKAGE / file).read_text().splitlines()) for file in files)


@contextmanager
def walking():
    """Record the walk of a block."""
    walk, seen, importing = Walk(), set(), 0
    here = None
    root = f"{PACKAGE}{os.sep}"

    def follow(frame, event, _):
        nonlocal here, importing
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_name == "<module>":
            importing += 1 if event == "call" else -1
        elif event == "call" and not importing and code.co_filename.startswith(root):
            file = Path(code.co_filename[len(root) :]).as_posix()
            walk.switches += here not in (None, file)
            here = file
            if file not in seen:
                seen.add(file)
                walk.files.append(file)

    sys.setprofile(follow)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def walk_of_a_checkpoint(folder):
    """`finetune_mile.load` of a checkpoint that MoCo's training script saves."""
    import torch

    import finetune_mile
    from finetune_mile.networks.heads import build

    tensors = {f"module.encoder_q.{name}": tensor for name, tensor in build("resnet18").state_dict().items()}
    path = folder / "moco.pth.tar"
    torch.save({"epoch": 200, "arch": "resnet18", "state_dict": tensors}, path)
    with walking() as walk:
        finetune_mile.load(str(path))
    return walk


def walk_of_a_batch(folder):
    """The command on a small folder of photos, up to the first gradient."""
    import torch
    from accelerate import Accelerator
    from PIL import Image

    from finetune_mile.run import main

    for part, images in (("train", 8), ("val", 2)):
        for label, colour in enumerate(("red", "blue")):
            place = folder / "photos" / part / colour
            place.mkdir(parents=True)
            for number in range(images):
                pixels = torch.randint(256, (PHOTO_SIZE, PHOTO_SIZE, 3), dtype=torch.uint8).numpy()
                pixels[..., 2 * label] = 255
                Image.fromarray(pixels).save(place / f"{number}.jpg")

    def arrive(*_, **__):
        raise Arrived

    flags = ["--data", f"folder:{folder / 'photos'}", "--init", "none", "--arch", "resnet-demo", "--method", "mile"]
    flags += ["--steps", "4", "--batch-size", "4", "--set", "size=24", "--set", "workers=0"]
    backward, Accelerator.backward = Accelerator.backward, arrive
    walk = Walk()
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said, walking() as walk:
            code = main([*flags, "--out", str(folder / "run")])
        raise SystemExit(f"the command ended with {code} before a gradient: {said.getvalue()}")
    except Arrived:
        return walk
    finally:
        Accelerator.backward = backward


def show(title, walk):
    total = sum(walk.lines(stop) for stop in walk.stops)
    print(f"{title}: {len(walk.stops)} stops, {len(walk.files)} files, {total:,} lines, {walk.switches:,} switches")
    for number, stop in enumerate(walk.stops, start=1):
        print(f"{number:4} {walk.lines(stop):5} {stop}")


if __name__ == "__main__":
    os.environ.setdefault("ACCELERATE_USE_CPU", "1")
    with tempfile.TemporaryDirectory() as place:
        show("one checkpoint, finetune_mile.load", walk_of_a_checkpoint(Path(place)))
        show("\none batch, command line to gradient", walk_of_a_batch(Path(place)))
