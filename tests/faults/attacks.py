"""Kill commands, and break their disk: `python tests/faults/attacks.py` prints the table of docs/reliability.md.

A try is a process of its own that is killed at the n-th event of its files (or in the middle of a write), or at a
random time, or whose disk fails from the n-th event on. Then the same command is run again. It must end well, with the
same bytes as a command that nothing happened to, and without leftovers; and neither may print a traceback.

--record FILE keeps a line for each try, so that the tries of several sessions add up: --tries N makes those that are
missing until each command has N kills at events, and fewer of the other kinds. --again repeats what was not held.
--only WORD: a command or a kind. --table prints the record. tests/faults/attacks.jsonl is the record of the page.
"""

import argparse
import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in (".", "tables", "faults")]

from lab import KILL, ROOT, Lab  # noqa: E402
from shortcuts import tinted_photos  # noqa: E402
from tiny import write_tiny  # noqa: E402

SMALL = [
    "--batch-size", "8", "--steps", "6", "--size", "24", "--set", "evaluate.images=10", "--set",
    "evaluate.labels=false", "--set", "log_every=1", "--set", "checkpoint_every=2", "--set", "workers=0",
]  # fmt: skip
RUN = ["--data", "demo:60", *SMALL]
NEW = ["--init", "none", "--arch", "resnet-demo"]
KEPT = ["--init", "simclr-demo"]
PHOTOS = [*KEPT, "--size", "24", "--workers", "0", "--data", "photos"]
QUICK = {"training.quickstart.SEEDS": 1, "training.plan.LEAST_STEPS": 10,
         "training.quickstart.COMPARED": {"softmax": [], "sigmoid": []}}  # fmt: skip
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
FAULTS = {"ENOSPC": errno.ENOSPC, "EACCES": errno.EACCES, "EIO": errno.EIO}
X = ["--out", "x"]
WEIGHTS = "export/model.safetensors"


@dataclass(frozen=True)
class Command:
    """A command, what it needs first, and which of its files must be the same bytes."""

    words: list[str]
    same: tuple[str, ...]  # globs
    needs: tuple[str, ...] = ()  # other commands, in the same folder
    values: dict = field(default_factory=dict)
    run: str = ""  # its run folder


def run_of(*words, init=NEW):
    return ["run", *RUN, *init, *words]


def method(name, *words):
    """A run of a method that needs nothing else."""
    return Command(
        run_of("--method", name, *words, "--resume", "auto", "--out", "r"), (f"r/{WEIGHTS}", "r/results.json"), run="r"
    )


def pretraining(name):
    words = ["--data", "demo:60", "--arch", "resnet-mini", "--steps", "6", "--batch-size", "8", "--set", "log_every=1"]
    more = ["--set", "checkpoint_every=2", "--set", "workers=0", "--resume", "auto", "--out", "r"]
    return Command(["pretrain", "--set", f"method={name}", *words, *more], ("r/export/*", "r/results.json"), run="r")


def export(form, same, need):
    return Command(["export", "r", "--to", form, *X], same, (need,))


COMMANDS = {
    "run, mile": Command(
        run_of("--k-t", "2", "--k-s", "1", "--set", "mile.warmup=0", "--resume", "auto", "--out", "r"),
        (f"r/{WEIGHTS}", "r/results.json", "r/per_class.csv"), run="r",
    ),
    **{f"run, {name}": method(name) for name in ("sigmoid", "wan")},
    "run, auto": method("auto", "--k-t", "2", "--k-s", "1", "--set", "mile.warmup=0"),
    "run, self-distill": method("self-distill"),
    "run, labels of a pool, --refit": method(
        "noisy-student", "--semi", "all", "--set", "noisy_student.pseudo_labels=cycle", "--fraction", "0.5", "--refit"
    ),
    "run, photos without labels": Command(
        ["run", "--data", "photos", "--unlabelled", "photos/val", *KEPT, *SMALL, "--method",
            "softmax", "--set", "then.steps=4", "--resume",
         "auto", "--out", "r"],
        (f"r/{WEIGHTS}", "r/results.json"), run="r",
    ),
    "run --track tensorboard": method("softmax", "--track", "tensorboard"),
    "run --trunk frozen": Command(
        run_of("--method", "softmax", "--trunk", "frozen", "--resume", "auto", "--out", "r", init=KEPT),
        (f"r/{WEIGHTS}", "r/results.json", "cache/features/*/train.npy"), run="r",
    ),
    "run --seeds 2": Command(
        run_of("--method", "softmax", "--seeds", "2", "--out", "r"), (f"r/seed-*/{WEIGHTS}", "r/summary.json"),
        run="r/seed-0",
    ),
    **{f"pretrain, {name}": pretraining(name) for name in ("simclr", "mocov2", "byol", "swav")},
    "embed OUT --views 1": Command(["embed", *PHOTOS, "--views", "1", "out"], ("out/*.npy", "out/*.parquet")),
    "probe": Command(["probe", *PHOTOS, "--seeds", "1", "--json", "p.json"], ("cache/features/*/*.npy", "p.json")),
    "export --to torch": export("torch", ("x/config.json", "x/README.md"), "run, mile"),
    "export --to onnx": export("onnx", ("x/*",), "run, mile"),
    "export --to timm": export("timm", ("x/*",), "timm"),
    "export --to hf": export("hf", ("x/*",), "timm"),
    "predict --annotate": Command(
        ["predict", "r", "photos/val", "--workers", "0", "--annotate", "x"], ("x/**/*.png",), ("run, mile",)
    ),
    "quickstart --out": Command(
        ["quickstart", "photos", *KEPT, "--size", "24", "--workers", "0", *X],
        ("x/labelled.txt", "x/model/export/config.json"), values=QUICK,
    ),
    "table": Command(
        ["table", "tiny.yaml", "--quick", "--runs", "runs", "--out", "ledger", "--jobs", "1", "--no-prices"],
        (f"runs/*/*/*/0/{WEIGHTS}", "ledger/ledger.md"),
    ),
    "pack": Command(["pack", "photos", "x", "--shard", "20"], ("x/*",)),
    "weights convert": Command(["weights", "convert", f"r/{WEIGHTS}", "x"], ("x/*",), ("run, mile",)),
    "eval --out": Command(
        ["eval", "--model", "run:r", "--data", "demo:60", "--draws", "0", *X], ("x/results.json", "x/per_class.csv"),
        ("run, mile",),
    ),
    "audit --out": Command(["audit", *PHOTOS[:-2], "photos", *X], ("x/audit.csv", "x/audit.json")),
    "weights add": Command(
        ["weights", "add", f"r/{WEIGHTS}", "--name", "mine"], ("config/weights/*",), ("run, mile",)
    ),
    "check --list": Command(["check", "--data", "photos", "--list", "x.csv"], ("x.csv",)),
}  # fmt: skip
HELPERS = {
    "timm": Command(run_of("--method", "softmax", "--out", "r", init=["--init", "none", "--arch", "resnet18"]), ())
}
DISK, PAGE = "a small disk", 4096
KINDS = ("killed at an event", "killed at a random time", *SIGNALS, *FAULTS, DISK)
MOUNTS = hasattr(os, "geteuid") and os.geteuid() == 0
RECORD = Path(__file__).with_suffix(".jsonl")
VARIES = ("seconds", "seconds_features", "seconds_probes", "store", "speed", "images_per_second")  # in JSON


class Place:
    """Folders for the tries of one command, each like a fresh machine."""

    def __init__(self, lab, base, name):
        self.lab, self.name, self.command = lab, name, COMMANDS[name]
        self.base = Path(base) / name.replace(" ", "_").replace("/", "_")
        self.fresh, self.used = self.base / "fresh", self.base / "used"
        shutil.rmtree(self.base, ignore_errors=True)
        (self.fresh / "cache").mkdir(parents=True)
        tinted_photos(self.fresh / "photos", 40)
        write_tiny(self.fresh)
        self.renew()
        for need in self.command.needs:
            ended = self.run((COMMANDS | HELPERS)[need])
            assert ended.code == 0, ended.err
        shutil.rmtree(self.fresh)
        self.used.rename(self.fresh)
        self.renew()
        self.whole = self.run()
        assert self.whole.code in (0, 1 if name == "check --list" else 0), self.whole.err
        self.grows = max(size_of(self.used) - size_of(self.fresh), 1)
        self.expected = self.content()
        assert self.expected, f"{name}: nothing to compare"

    def renew(self):
        shutil.rmtree(self.used, ignore_errors=True)
        shutil.copytree(self.fresh, self.used, symlinks=True)

    def run(self, command=None, **fault):
        command = command or self.command
        return self.lab.run(
            command.words, cwd=self.used, below=[self.used], values=command.values,
            FINETUNE_MILE_CACHE=self.used / "cache", FINETUNE_MILE_CONFIG=self.used / "config", **fault,
        )  # fmt: skip

    def content(self):
        """The files that must be the same: name to bytes, or to what does not vary of JSON."""
        files = {
            path.relative_to(self.used).as_posix(): path
            for pattern in self.command.same
            for path in self.used.glob(pattern)
            if path.is_file()
        }
        return {name: _comparable(path) for name, path in files.items()}

    def leftovers(self):
        return [
            str(path.relative_to(self.used))
            for path in self.used.rglob("*")
            if path.name.endswith(".part") or path.name.startswith("tmp")
        ]

    def attack(self, **fault):
        """One try; what went wrong, in words."""
        if "room" in fault:
            with self.small_disk(fault["room"]) as enlarge:
                broken = self.run()
                return broken, self.wrong(broken, fault, before=enlarge)
        self.renew()
        how = fault
        if "share" in fault:
            how = {"after": fault["share"] * self.whole.seconds, "send": fault.get("send", KILL)}
        broken = self.run(**how)
        return broken, self.wrong(broken, fault)

    @contextlib.contextmanager
    def small_disk(self, room):
        """Instead of the used folder a disk of its own, with room for a share of what the command writes."""
        shutil.rmtree(self.used, ignore_errors=True)
        self.used.mkdir()
        pages = size_of(self.fresh) + int(room * self.grows)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * PAGE}", "tmpfs", self.used], check=True)
        try:
            shutil.copytree(self.fresh, self.used, symlinks=True, dirs_exist_ok=True)
            yield lambda: subprocess.run(["mount", "-o", f"remount,size={2**28}", self.used], check=True)
        finally:
            subprocess.run(["umount", self.used], check=True)

    def wrong(self, broken, fault, before=lambda: None):
        """What is wrong about a command that was broken, and about the same command again; `before` that."""
        wrong = [] if broken.calm else [f"ended with {broken.code}: {broken.err[-2000:]}"]
        if "send" in fault and broken.code not in (self.whole.code, -fault["send"], 128 + fault["send"]):
            wrong.append(f"exit code {broken.code}: {broken.err[-300:]}")
        if broken.code and ("room" in fault or fault.get("do") in FAULTS.values()):
            wrong += self.judge(broken, fault.get("do", errno.ENOSPC))
        complete = self.content() == self.expected and not self.leftovers()  # killed after its last step
        before()
        again = self.run()
        if not again.calm or (again.code != self.whole.code and not complete):
            wrong.append(f"again: {again.code}: {again.err[-2000:]}")
        elif (found := self.content()) != self.expected:
            names = found.keys() | self.expected.keys()
            wrong.append(f"other bytes: {sorted(n for n in names if found.get(n) != self.expected.get(n))}")
        elif left := self.leftovers():
            wrong.append(f"left: {left}")
        return wrong

    def judge(self, broken, fault):
        """What is wrong about the way in which a command ended whose disk failed."""
        wrong = [] if broken.code == 1 else [f"exit code {broken.code}"]
        said = [line for line in broken.err.splitlines() if line.startswith("error: ")]
        tops = {path.name for path in self.used.iterdir()} | {str(self.used), *self.command.words}
        names = "|".join(re.escape(top) for top in tops if not top.startswith("-"))
        if len(said) != 1 or not re.search(rf"(?<!\w)({names})(?=[/:. ])", said[0]):
            wrong.append(f"not one sentence with a path: {broken.err[-600:]}")
        elif fault == errno.ENOSPC and "the disk is full" not in said[0]:
            wrong.append(f"does not say that the disk is full: {said[0]}")
        info = self.used / self.command.run / "run.json" if self.command.run else None
        if info is not None and info.is_file() and json.loads(info.read_text())["status"] == "running":
            wrong.append("run.json says that it is running")
        return wrong


def size_of(folder):
    """Pages that the files of a folder take on a tmpfs, and their folders."""
    return sum(1 - (-path.stat().st_size // PAGE) if path.is_file() else 1 for path in folder.rglob("*"))


def _comparable(path):
    if path.suffix == ".md":  # without how long it took
        return re.sub(rb"\b[\d.]+ (s|min|h)\b", b"", path.read_bytes())
    if path.suffix not in (".json", ".jsonl"):
        return path.read_bytes()

    def still(value):
        if isinstance(value, dict):
            return {key: still(each) for key, each in value.items() if key not in VARIES}
        return [still(each) for each in value] if isinstance(value, list) else value

    return (
        [still(json.loads(line)) for line in path.read_text().splitlines()]
        if path.suffix == ".jsonl"
        else still(json.loads(path.read_text()))
    )


def tries(whole, count, draw, known=()):
    """So many attacks of each kind, without those that are known: label to the fault of each try."""

    def new(kind, wanted, fault_of, choices):
        done = [line for line in known if line["kind"] == kind]
        left = [fault for fault in map(fault_of, choices) if fault not in [line["fault"] for line in done]]
        return draw.sample(left, max(0, min(wanted - sum(map(counts, done)), len(left))))

    events, shares = range(1, whole.events + 1), [n / 1000 for n in range(1000)]
    few, some = -(-count // 4), -(-count // 3)
    return {
        "killed at an event": new("killed at an event", count, lambda n: {"at": n, "do": KILL}, events),
        "killed at a random time": new("killed at a random time", some, lambda share: {"share": share}, shares),
        **{
            name: new(name, few, lambda share, number=number: {"share": share, "send": int(number)}, shares)
            for name, number in SIGNALS.items()
        },
        **{name: new(name, few, lambda n, code=code: {"at": n, "do": code}, events) for name, code in FAULTS.items()},
        DISK: new(DISK, few, lambda room: {"room": room}, shares[:950]) if MOUNTS else [],
    }


def counts(line):
    """Was it a try? One that came too late, to a command that had ended well, was none unless something is wrong."""
    return line["code"] not in (0, *line["late"]) or bool(line["wrong"])


def newest(lines):
    """The last line of each try: what was not held is tried again when it is mended."""
    return list({(line["command"], line["kind"], json.dumps(line["fault"])): line for line in lines}.values())


def table(lines):
    """Markdown from the lines of a record: held of tries."""
    again, lines = lines, newest(lines)
    kinds = [kind for kind in KINDS if any(line["kind"] == kind for line in lines)]
    text = ["| command (events) | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    counted = [line for line in lines if counts(line)]

    def cell(kind, command=None):
        some = [line for line in counted if line["kind"] == kind and command in (None, line["command"])]
        return f"{sum(not line['wrong'] for line in some)} of {len(some)}" if some else "-"

    events = {line["command"]: line["events"] for line in lines}
    for command, count in sorted(events.items(), key=lambda pair: [*COMMANDS].index(pair[0])):
        text.append(f"| {command} ({count:,}) | " + " | ".join(cell(kind, command) for kind in kinds) + " |")
    text.append("| all | " + " | ".join(map(cell, kinds)) + " |")
    held = sum(not line["wrong"] for line in counted)
    kills = sum(line["kind"].startswith("killed") for line in counted)
    mended = sum(bool(line["wrong"]) for line in again) - len(counted) + held
    said = f"{held} of {len(counted)} tries were held, {kills} of them kills. {mended} were held only when repeated."
    return "\n".join([*text, "", said])


def checksums():
    """Print what it costs to compare the checksums of kept features."""
    import numpy as np

    from finetune_mile.compute.rows import _sums_of

    for width in (384, 2048):
        rows = np.random.default_rng(0).random((2**27 // (2 * width), width)).astype(np.float16)
        began = time.process_time()
        _sums_of(rows, np.arange(len(rows)), {})
        seconds = (time.process_time() - began) * 2**30 / rows.nbytes
        print(f"{width:,} features in float16: {seconds:.1f} seconds of the processor for a GB")


PLACES = ["afile", "afile/x", "link", "link/x", "y" * 300, "/proc/x", "/proc/x/y", ""]
PLACED = ("weights convert", "weights add", "pack", "eval --out", "predict --annotate", "check --list", "audit --out",
          "embed OUT --views 1", "export --to torch", "pretrain, simclr")  # fmt: skip


def places(lab, base, names):
    """Give commands outputs, caches and folders for cards that cannot be; the tries, and what was not one sentence."""
    count, wrong = 0, []
    for name in names:
        place = Place(lab, base, name)
        outputs = ("x", "r", "out", "x.csv")
        at = max((i for i, word in enumerate(place.command.words) if word in outputs), default=None)
        for bad in PLACES:
            place.renew()
            (place.used / "afile").write_text("mine")
            (place.used / "link").symlink_to("nowhere/at/all")
            elsewhere = {"FINETUNE_MILE_CACHE": "cache", "FINETUNE_MILE_CONFIG": "config"}
            env = {key: place.used / value for key, value in elsewhere.items()}
            if name == "weights add":
                env["FINETUNE_MILE_CONFIG"] = place.used / (bad or "afile")
            words = [bad if i == at else word for i, word in enumerate(place.command.words)]
            ended = lab.run(words, cwd=place.used, values=place.command.values, **env)
            said = [line for line in ended.err.splitlines() if line.startswith("error: ")]
            count += 1
            if not ended.calm or ended.code not in (1, 2) or len(said) != 1:
                wrong.append(f"{name}, {bad[:20]!r}: {ended.code}: {ended.err[-600:]}")
            if (place.used / "afile").read_text() != "mine":
                wrong.append(f"{name}, {bad[:20]!r}: a file was overwritten")
    return count, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a command, or a kind of attack; may be repeated")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--again", action="store_true", help="repeat the tries that were not held, and no others")
    parser.add_argument("--table", action="store_true", help="print the record, and stop")
    parser.add_argument("--places", action="store_true", help="outputs that cannot be written, and stop")
    parser.add_argument("--checksums", action="store_true", help="measure the checksums of features, and stop")
    options = parser.parse_args()
    if options.checksums:
        return checksums()
    lines = read_record(options.record)
    wanted = options.only or []
    names = [name for name in COMMANDS if name in wanted] or list(COMMANDS)
    kinds = [kind for kind in KINDS if kind in wanted] or list(KINDS)
    failed = 0
    with tempfile.TemporaryDirectory() as base, Lab(base) as lab:
        if options.places:
            count, wrong = places(lab, base, names if wanted else PLACED)
            print(*wrong, f"{count} tries, {len(wrong)} not one sentence", sep="\n")
            return int(bool(wrong))
        for name in [] if options.table else names:
            known = [line for line in newest(lines) if line["command"] == name]
            if options.again and not any(line["wrong"] for line in known):
                continue
            place = Place(lab, base, name)
            todo = tries(place.whole, options.tries, random.Random(f"{options.seed} {name} {len(known)}"), known)
            if options.again:
                todo = {name: [e["fault"] for e in known if e["wrong"] and e["kind"] == name] for name in KINDS}
            for kind, fault in [(each, fault) for each in kinds for fault in todo[each]]:
                broken, wrong = place.attack(**fault)
                for path, word in ((base, "PLACE"), (ROOT, "REPOSITORY"), (sys.prefix, "PYTHON")):
                    wrong = [text.replace(str(path), word) for text in wrong]
                late = [place.whole.code] if place.whole.code else []
                lines.append({"command": name, "kind": kind, "fault": fault, "code": broken.code, "late": late,
                              "wrong": [text[-700:] for text in wrong], "events": place.whole.events})  # fmt: skip
                with options.record.open("a") as stream:
                    stream.write(json.dumps(lines[-1]) + "\n")
                if wrong:
                    failed += 1
                    print(name, kind, fault, *wrong, sep="\n  ", flush=True)
    print(table(lines))
    return int(failed > 0)


def read_record(path=RECORD):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
