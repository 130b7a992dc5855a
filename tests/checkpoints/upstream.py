"""Files as upstream's code writes them, and what `finetune_mile.load` makes of each.

`python -m tests.checkpoints.upstream` writes the table in docs/checkpoints.md; `... NAME` prints one row.
The samples are in ../shared/checkpoints/upstream; most of them, with fewer features, in parity/, newer ones only there.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import finetune_mile
from finetune_mile.core.problems import Problem

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from weights_page import BEGIN, END  # noqa: E402

PARITY = HERE / "parity"
SHARED = HERE.parents[1].parent / "shared" / "checkpoints" / "upstream"
FOLDER = SHARED if SHARED.is_dir() else PARITY
PAGE = HERE.parents[1] / "docs" / "checkpoints.md"
TOLERANCE = 1e-4  # of the largest feature
BESIDE = 0.01  # a misreading is at least so far away


def _builder() -> Any:
    """The samples' own build.py."""
    spec = importlib.util.spec_from_file_location("upstream_build", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDER = _builder()


def names() -> list[str]:
    return sorted({path.name.split(".")[0] for folder in (FOLDER, PARITY) for path in folder.glob("*.json*")})


def recorded(name: str) -> dict[str, Any]:
    """What upstream's network gave for a sample."""
    place = FOLDER if (FOLDER / f"{name}.npz").exists() else PARITY
    return dict(np.load(place / f"{name}.npz"))


def specification(name: str) -> dict[str, Any]:
    packed, plain = PARITY / f"{name}.json.gz", FOLDER / f"{name}.json"
    text = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    found: dict[str, Any] = json.loads(text)
    return found


def write(name: str, folder: Path) -> Path:
    """Write the file of a sample below a folder."""
    path: Path = BUILDER.write(specification(name), folder)
    return path


@dataclass(frozen=True)
class Distance:
    """Largest difference over the largest feature: to upstream's, and to the nearest misreading."""

    upstream: float
    wrong: float

    @property
    def exact(self) -> bool:
        return self.upstream < TOLERANCE and self.wrong > BESIDE


def distance(network: nn.Module, name: str, kind: str = "features") -> Distance:
    """How far the features are from upstream's, at every size; the repository has the first 64 features.

    Args:
        network: takes images (B, 3, H, W).
        name: of the sample.
        kind: of its features: `features`, or `port_features` (what Separius' port gives, mistakes included).
    """
    data = recorded(name)
    sizes = [key.removeprefix(f"{kind}_") for key in data if key.startswith(f"{kind}_")]
    assert sizes
    to_upstream, to_wrong = [], [float("inf")]
    for size in sizes:
        expected = data[f"{kind}_{size}"]
        with torch.inference_mode():
            features = network.eval()(BUILDER.image(int(size))).numpy()[:, : expected.shape[1]]
        scale = np.abs(expected).max()
        to_upstream.append(float(np.abs(features - expected).max() / scale))
        wrong = [data[key] for key in data if re.fullmatch(rf"WRONG_.*features_{size}", key)]
        to_wrong += [float(np.abs(features - each).max() / scale) for each in wrong]
    return Distance(max(to_upstream), min(to_wrong))


def printed_ways(message: str) -> list[dict[str, str]]:
    """What a message tells the user to type, as arguments for `finetune_mile.load`; placeholders are left out."""
    ways = [{"init": text} for text in re.findall(r"--init '([^']+)'(?! --arch timm:NAME)", message)]
    ways += [{"arch": text} for text in re.findall(r"--arch ([\w:=.-]*\w)", message)]
    ways += [{"format": text} for text in re.findall(r"--format ([\w-]+)", message)]
    return [way for way in ways if not re.search(r"NAME|=N$", next(iter(way.values())))]


@dataclass(frozen=True)
class Outcome:
    """What became of one sample."""

    state: str  # exact, asks, refused, assumes, port; or a fault: WRONG, CRASH, DEAD END
    detail: str
    found: tuple[str, str] | None = None  # format and network, where it loaded


def try_sample(name: str, folder: Path) -> Outcome:
    """Load a sample; where it is refused, do everything that the message prints."""
    path = write(name, folder)
    try:
        network = finetune_mile.load(str(path))
    except Problem as problem:
        return _refused(name, path, problem)
    except Exception as error:
        return Outcome("CRASH", f"{type(error).__name__}: {error}")
    report = network.report
    found = report.format, report.arch
    if not any(key.startswith("features_") for key in recorded(name)):
        port = finetune_mile.load(str(path), format="mile-simclrv2-sk")
        if distance(port, name, "port_features").exact:
            words = "TensorFlow's padding; `--format mile-simclrv2-sk` gives the port's own features, exact"
            return Outcome("port", words, found)
    apart = distance(network, name)
    if apart.exact:
        return Outcome("exact", f"{apart.upstream:.0e}", found)
    told = next((text for text in report.assumed if "anti-aliasing" in text), "")
    if "aa50" in name or "blur50" in name:
        return Outcome("assumes" if told else "WRONG", f"the load report says: {told}", found)
    return Outcome("WRONG", f"{apart.upstream:.0e} from upstream, {apart.wrong:.0e} from a misreading", found)


def _refused(name: str, path: Path, problem: Problem) -> Outcome:
    message = str(problem)
    if len(problem.sentences) != 1:
        return Outcome("CRASH", f"{len(problem.sentences)} sentences: {message}")
    ways = printed_ways(message)
    if not ways:
        return Outcome("refused", message)
    exact: list[str] = []
    for way in ways:
        try:
            network = finetune_mile.load(way.get("init", str(path)), arch=way.get("arch"), format=way.get("format"))
        except Problem as again:
            return Outcome("DEAD END", f"{way}: {again}")
        if distance(network, name).exact:
            exact.append(" ".join(f"`--{flag} {value}`" for flag, value in way.items()))
    if not exact:
        return Outcome("DEAD END", f"no printed way gives upstream's features: {message}")
    return Outcome("asks", min(exact, key=len))


# ----------------------------------------------------------------------------------- the table

WORDS = {
    "exact": "exact", "asks": "asks, and a printed way is exact", "refused": "refused",
    "assumes": "loads, and says what it assumes", "port": "loads",
}  # fmt: skip


def row(name: str, outcome: Outcome) -> str:
    format, network = outcome.found or ("", "")
    made_by = re.sub(r"@([0-9a-f]{7})[0-9a-f]*", r"@\1", specification(name)["upstream"].split(":")[0].split(",")[0])
    made_by = made_by.split(" ")[0]
    detail = outcome.detail.replace("|", "\\|")
    if outcome.state == "refused":  # the reason, without the names of tensors
        detail = re.sub(r" \(.*?\)", "", detail.partition(": ")[2]).split(";")[0]
    state = WORDS.get(outcome.state, f"**{outcome.state}**")
    return f"| {name} | {made_by} | {format} {network} | {state} | {detail} |\n"


def write_table(outcomes: dict[str, Outcome], page: Path) -> None:
    """Put the table into the page, between its two marks."""
    counts = {
        state: sum(o.state == state for o in outcomes.values()) for state in (*WORDS, "WRONG", "CRASH", "DEAD END")
    }
    lines = ["| sample | made by | found as | result | difference, way or reason |\n", "|---|---|---|---|---|\n"]
    lines += [row(name, outcome) for name, outcome in outcomes.items()]
    total = ", ".join(f"{state.lower()} {count}" for state, count in counts.items())
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(
        f"{before}{BEGIN}\n{len(outcomes)} samples: {total}.\n\n{''.join(lines)}{END}{after}", encoding="utf-8"
    )


def main(wanted: list[str]) -> None:
    """Try the samples that are named, or all of them and write the table."""
    outcomes = {}
    for name in wanted or names():
        with tempfile.TemporaryDirectory() as folder:
            outcome = try_sample(name, Path(folder))
        outcomes[name] = Outcome(outcome.state, outcome.detail.replace(f"{folder}/", ""), outcome.found)
        sys.stdout.write(row(name, outcomes[name]))
        sys.stdout.flush()
    if not wanted:
        write_table(outcomes, PAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
