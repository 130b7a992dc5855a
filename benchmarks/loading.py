"""Time and memory of loading a ResNet-50 and a ViT-B file, against plain torch in the same run.

    python benchmarks/loading.py [--repeats N]

Ours is `open_trunk(FILE)`: read safely, detect, rename, check every tensor, build the network.
Plain torch is `torch.load(weights_only=True)`, or safetensors' `load_file`, and `load_state_dict` into a
network that is there already; `built_s` is the same with the network built too, as ours is. Prints a line of JSON
for each kind of file; the ratio should stay under 1.5, and so should the memory that loading takes on top, over
the size of the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file
from torchvision.models import resnet50

from finetune_mile.checkpoints.loading import open_trunk

_PEAK = """
import sys
from pathlib import Path
from typing import Any
from finetune_mile.checkpoints.loading import open_trunk

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

open_trunk("none", arch="resnet50")  # whatever torch sets up once
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = field("VmRSS")
opened = open_trunk(sys.argv[1])
print(field("VmHWM") - before)
"""


def plain(path: Path, network: torch.nn.Module) -> None:
    """What a script without us would do."""
    safe = path.suffix == ".safetensors"
    file: Any = load_file(path) if safe else torch.load(path, weights_only=True, map_location="cpu")
    state, mark = file.get("state_dict", file), "module.encoder_q."
    if any(key.startswith(mark) for key in state):
        state = {k.removeprefix(mark): v for k, v in state.items() if k.startswith(mark)}
    network.load_state_dict(state)


def resnet() -> torch.nn.Module:
    network: torch.nn.Module = resnet50(num_classes=128)
    return network


def flat_file(folder: Path) -> Path:
    """Nothing but one ResNet-50."""
    path = folder / "resnet50.pth"
    torch.save(resnet50(num_classes=128).state_dict(), path)
    return path


def safe_file(folder: Path) -> Path:
    """The same as safetensors."""
    path = folder / "resnet50.safetensors"
    save_file(resnet50(num_classes=128).state_dict(), path)
    return path


def moco_file(folder: Path) -> Path:
    """A MoCo-v2 file of the real layout: ResNet-50 twice, and the queue."""
    encoders = {name: resnet50(num_classes=128) for name in ("encoder_q", "encoder_k")}
    state = {
        f"module.{name}.{key}": value
        for name, network in encoders.items()
        for key, value in network.state_dict().items()
    }
    state |= {"module.queue": torch.randn(128, 65536), "module.queue_ptr": torch.zeros(1).long()}
    path = folder / "moco_v2.pth.tar"
    torch.save({"epoch": 200, "arch": "resnet50", "state_dict": state}, path)
    return path


def vit_file(folder: Path) -> Path:
    """A flat ViT-B/16."""
    path = folder / "vit_base.pth"
    torch.save(vit_base().state_dict(), path)
    return path


def vit_base() -> torch.nn.Module:
    network: torch.nn.Module = timm.create_model("vit_base_patch16_224", num_classes=0)
    return network


def compare(path: Path, build: Callable[[], torch.nn.Module], repeats: int) -> dict[str, object]:
    """Interleave the loads of one file; medians, and the memory that reading takes."""
    network = build()
    ours, theirs, built = [], [], []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        plain(path, network)
        middle = time.perf_counter()
        open_trunk(str(path))
        end = time.perf_counter()
        plain(path, build())
        last = time.perf_counter()
        if repeat:  # the first round warms up
            theirs.append(middle - start)
            ours.append(end - middle)
            built.append(last - end)
    command = [sys.executable, "-c", _PEAK, str(path)]
    grown = subprocess.run(command, check=True, capture_output=True, text=True)
    return {
        "file": path.name,
        "file_mb": round(path.stat().st_size / 2**20),
        "ours_s": round(statistics.median(ours), 3),
        "torch_s": round(statistics.median(theirs), 3),
        "built_s": round(statistics.median(built), 3),
        "ratio": round(statistics.median(ours) / statistics.median(theirs), 2),
        "ratio_built": round(statistics.median(ours) / statistics.median(built), 2),
        "loading_peak_over_file": round(int(grown.stdout) * 1024 / path.stat().st_size, 2),
    }


def main() -> None:
    """Each kind of file, one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for write, build in ((flat_file, resnet), (safe_file, resnet), (moco_file, resnet), (vit_file, vit_base)):
            print(json.dumps(compare(write(Path(folder)), build, args.repeats)))


if __name__ == "__main__":
    main()
