"""What strangers may send, drawn by hypothesis: each reader gives a value or one short sentence, and nothing else.

A few examples each, always the same ones. FINETUNE_MILE_FUZZ_SECONDS=300 draws others for so many seconds a reader
(`pytest -m slow tests/faults/test_fuzz.py`). What was found is in `FOUND`, and is tried each time.
"""

import atexit
import io
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from shortcuts import ROOT, tinted_photos

from finetune_mile.checkpoints.cards import read_card
from finetune_mile.checkpoints.exporting import write_export
from finetune_mile.checkpoints.init import Located
from finetune_mile.checkpoints.loading import open_contents, open_with_head
from finetune_mile.checkpoints.readers import read
from finetune_mile.cli import main
from finetune_mile.config.resolve import read_yaml, resolve_tree
from finetune_mile.config.schema import FullRecipe
from finetune_mile.core.problems import BadImage, Problem
from finetune_mile.images.name_lists import read_list
from finetune_mile.images.pipeline import decode
from finetune_mile.images.sources import check_truth, load_data
from finetune_mile.networks.heads import build, new_head
from finetune_mile.training.folder import RunFolder, read_info, resumed_recipe

sys.path.append(str(ROOT / "tests/checkpoints"))
import bundles
import samples

SECONDS = float(os.environ.get("FINETUNE_MILE_FUZZ_SECONDS", "0"))
EXAMPLES, BOUND = 25, 10  # of one round; seconds of the processor for one example

# ------------------------------------------------------------------------------------ what is drawn

NUMBERS = st.one_of(
    st.integers(-3, 300), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30]), st.floats(), st.booleans()
)
WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "a" * 5000, "../../x", "\x1b[31m", "nul\0", "\udce9", "9" * 400, "resnet18", "none", "<b>"]),
)
PLAIN = st.one_of(st.none(), NUMBERS, WORDS)
JSON = st.recursive(
    PLAIN, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)), max_leaves=8
)


def bytes_of(text):
    return text.encode("utf-8", "surrogatepass")


@st.composite
def spoilt(draw, honest):
    """The bytes of an honest file with some of them replaced, taken out or put in."""
    data = bytearray(draw(honest) if isinstance(honest, st.SearchStrategy) else honest)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        how = draw(st.sampled_from(["set", "insert", "delete", "cut", "number"]))
        if how == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif how == "delete":
            del data[at : at + draw(st.integers(1, 9))]
        elif how == "number":
            data[at : at + 4] = struct.pack("<I", draw(st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1])))
        else:
            del data[at:]
    return bytes(data)


@st.composite
def spoilt_tree(draw, honest):
    """A mapping of an honest file with some entries replaced, added or left out."""
    tree = dict(honest)
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.one_of(st.sampled_from(sorted(tree) or ["x"]), WORDS))
        if draw(st.booleans()):
            tree[key] = draw(JSON)
        else:
            tree.pop(key, None)
    return tree


SMALL = ["finetune-mile", "byol", "simclr-tf", "vissl", "dino", "solo-learn", "torchvision", "vit"]


@cache
def sample(name):
    return samples.SAMPLES[name]()


@st.composite
def spoilt_contents(draw):
    """The tensors of a format that we read, with odd names, shapes and entries."""
    contents = sample(draw(st.sampled_from(sorted(samples.SAMPLES) if SECONDS else SMALL)))
    homes = [contents.tree, *(value for value in contents.tree.values() if isinstance(value, dict) and value)]
    place = draw(st.integers(0, len(homes) - 1))
    home = dict(homes[place])
    for _ in range(draw(st.integers(1, 4))):
        key = draw(st.sampled_from(sorted(map(str, home)) or ["x"]))
        how = draw(st.sampled_from(["shape", "name", "number", "drop", "value"]))
        if how == "shape":
            shape = draw(st.lists(st.integers(0, 5), max_size=6))
            home[key] = torch.zeros(shape, dtype=draw(st.sampled_from([torch.float32, torch.int64, torch.bool])))
        elif how == "name" and key in home:
            home[draw(WORDS) + key] = home.pop(key)
        elif how == "number" and key in home:
            digits = draw(st.sampled_from(["0", "7", "99", "1000000000", "9" * 400, "٣"]))
            home["".join(digits if c.isdigit() else c for c in key)] = home.pop(key)
        elif how == "drop":
            home.pop(key, None)
        else:
            home[key] = draw(JSON)
    tree = home if place == 0 else {k: home if v is homes[place] else v for k, v in contents.tree.items()}
    return replace(contents, tree=tree)


CONFIG = {
    "arch": "resnet-demo", "padding": "torch", "num_classes": 2, "classes": ["a", "b"], "mean": [0.5] * 3,
    "std": [0.2] * 3, "size": 24, "crop": 1.0, "interpolation": "bilinear", "activation": "softmax", "threshold": 0.25,
    "thresholds": [0.5, 0.5], "label_names": ["a", "b"], "steps": 5, "fraction": 1.0, "antialias": True,
    "architecture": "resnet18", "pretrained_cfg": {"mean": [0.5] * 3, "input_size": [3, 24, 24]}, "model_type": "vit",
    "model_args": {"img_size": 24}, "image_size": 24, "hidden_act": "gelu", "num_attention_heads": 3,
}  # fmt: skip
RECIPE = {
    "init": "none", "data": "demo:50", "arch": "resnet-demo", "method": "mile", "steps": 5, "batch_size": 8, "size": 24,
    "mile": {"k_t": 2, "k_s": 1}, "optimizer": {"lr": 0.1, "name": "sgd"}, "base": "demo", "fractions": {"0.1": {}},
    "sources": {"steps": "x"}, "augment": {"flip": False}, "keep": "best", "fraction": 0.5, "seed": 0, "trunk": "all",
}  # fmt: skip
CARD = {
    "name": "card", "method": "mocov2", "arch": "resnet18", "padding": "torch", "file": "x.pth",
    "urls": ["https://example.org/x.pth"], "sha256": "0" * 64, "bytes": 5, "preprocess": {"size": 24}, "licence": "MIT",
    "finetune_top1": {"0.1": 5.0}, "features": [0.5], "aliases": ["other"], "files": [], "unpack": None,
}  # fmt: skip
INFO = {
    "status": "running", "seconds": 1.0, "world_size": 1, "recipe_sha256": "0" * 64, "recipe": {}, "requested": {},
    "versions": {"finetune-mile": "0"}, "git": None, "began": "2026-01-01", "made_by": "finetune_mile",
}  # fmt: skip
METRICS = [{"step": 1, "kind": "train", "loss": 0.5}, {"step": 2, "kind": "gate"}, {"step": 3, "kind": "eval"}]
ROWS = [
    ["file", "label", "split", "truth"],
    ["1.png", "a", "train", "a;b"],
    ["2.png", "b", "val", ""],
    ["3.png", "", ""],
]


def picture(form, mode="RGB"):
    stream = io.BytesIO()
    Image.effect_noise((40, 30), 50).convert(mode).save(stream, form)
    return stream.getvalue()


def torch_file(tree, **how):
    stream = io.BytesIO()
    torch.save(tree, stream, **how)
    return stream.getvalue()


def safetensors_file(header, data=bytes(64)):
    text = bytes_of(json.dumps(header, ensure_ascii=False))
    return struct.pack("<Q", len(text)) + text + data


WEIGHTS = {
    "epoch": 3,
    "state_dict": {f"layer1.{i}.conv1.weight": torch.ones(2, i + 1) for i in range(3)},
    "l": [1.5, "x"],
}
TORCH_FILES = [torch_file(WEIGHTS), torch_file(WEIGHTS, _use_new_zipfile_serialization=False)]
HEADER = {
    "conv1.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "layer1.0.conv1.weight": {"dtype": "F16", "shape": [4], "data_offsets": [16, 24]},
    "__metadata__": {"format": "pt", "finetune_mile": json.dumps(CONFIG)},
}
ENTRIES = {
    b"base_model/conv2d/kernel": bundles.entry(1, (4,), 0, 0, 16), b"global_step": bundles.entry(9, (), 0, 0, 8),
    b"base_model/batch_normalization/gamma": bundles.entry(1, (4,), 0, 0, 16),
}  # fmt: skip


@st.composite
def tensorflow_index(draw):
    entries = {b"": draw(st.sampled_from([bundles.header(), bundles.header(3), bundles.header(0, 1)])), **ENTRIES}
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.one_of(st.sampled_from(sorted(entries)), st.binary(max_size=9)))
        entries[key] = draw(st.one_of(spoilt(ENTRIES[b"global_step"]), st.binary(max_size=20)))
    return draw(st.one_of(st.just(bundles.table(entries)), spoilt(bundles.table(entries))))


# ------------------------------------------------------------------------------------ the readers


def opened(contents, folder):
    open_contents(contents, Located(path=folder / "x.pth", name="x"))


def checkpoint(data, folder):
    path = folder / "x.pth"
    path.unlink(missing_ok=True)  # the old one may still be mapped
    path.write_bytes(data)
    opened(read(path), folder)


def tensorflow(data, folder):
    (folder / "m.index").write_bytes(data)
    (folder / "m.data-00000-of-00001").write_bytes(bytes(64))
    opened(read(folder / "m"), folder)


def recipe(tree, folder):
    path = folder / "recipe.yaml"
    path.write_bytes(tree if isinstance(tree, bytes) else bytes_of(json.dumps(tree)))
    resolve_tree(FullRecipe, read_yaml(path), path, "test")


def card(tree, folder):
    path = folder / "card.yaml"
    path.write_bytes(tree if isinstance(tree, bytes) else bytes_of(json.dumps(tree)))
    read_card(path)


def csv_file(data, folder):
    (folder / "list.csv").write_bytes(data)
    load_data(f"csv:{folder / 'list.csv'}")


def image(data, folder):
    assert decode(data).shape[0] == 3


def label_file(data, folder):
    for name in ("list.txt", "split.json", "list.txt.xz"):
        (folder / name).write_bytes(data)
        try:
            read_list(folder / name)
        except Problem:
            continue
    check_truth(f"{folder / 'list.txt'}")


def run_folder(files, folder):
    info, metrics, start = files
    (folder / "recipe.yaml").write_text("method: mile\nsteps: 5\n")
    (folder / "run.json").write_bytes(info)
    (folder / "metrics.jsonl").write_bytes(metrics)
    (folder / "start.json").write_bytes(start)
    for reader in (read_info, resumed_recipe, lambda f: RunFolder(f).metrics(), lambda f: RunFolder(f).start()):
        try:
            reader(folder)
        except Problem:
            continue


NETWORK = {}


def export(config, folder):
    if not NETWORK:
        NETWORK["demo"] = build("resnet-demo")
        new_head(NETWORK["demo"], 2, "zero")
        write_export(folder, NETWORK["demo"], CONFIG)
        NETWORK["weights"] = (folder / "model.safetensors").read_bytes()
    odd, in_header = config
    text = odd if isinstance(odd, bytes) else bytes_of(json.dumps(odd))
    weights = NETWORK["weights"]
    if in_header:
        length = int.from_bytes(weights[:8], "little")
        header = json.loads(weights[8 : 8 + length])
        header["__metadata__"]["finetune_mile"] = text.decode("utf-8", "replace")
        weights = safetensors_file(header, weights[8 + length :])
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_bytes(text)
    open_with_head(str(folder), "RUN").thresholds("RUN")


STORE = {}  # a cache, photos, and the files of their features


def store_files():
    """The files of kept features, made once: name to bytes."""
    if not STORE:
        base = Path(tempfile.mkdtemp(prefix="kept-features-"))
        atexit.register(shutil.rmtree, base, ignore_errors=True)
        tinted_photos(base / "photos", 40, train=2, val=1)
        STORE.update(base=base, files={})
        embed_photos()
        STORE["files"] = {path.name: path.read_bytes() for path in kept_files() if path.name != ".lock"}
    return STORE["files"]


def kept_files():
    return [path for path in (STORE["base"] / "cache").rglob("*") if path.is_file()]


def embed_photos():
    words = ["embed", "--init", "simclr-demo", "--size", "24", "--workers", "0", "--data"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_MILE_CACHE", str(STORE["base"] / "cache"))
        assert main([*words, str(STORE["base"] / "photos")]) == 0


@st.composite
def spoilt_store(draw):
    """Files of kept features of which some are spoilt."""
    files = store_files()
    names = draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=3, unique=True))
    note = json.loads(files["features.json"])
    inner = spoilt_tree(note["depends_on"]).map(lambda tree: note | {"depends_on": tree})
    notes = st.one_of(spoilt_tree(note), inner).map(lambda tree: bytes_of(json.dumps(tree)))
    return {
        name: draw(st.one_of(notes, spoilt(files[name])) if name == "features.json" else spoilt(files[name]))
        for name in names
    }


def kept_features(spoilt_files, folder):
    """The same command gives the same features, whatever the files in the cache are."""
    files = store_files()
    (place,) = {path.parent for path in kept_files() if path.name == "features.json"}
    try:
        for name, content in (files | spoilt_files).items():
            (place / name).write_bytes(content)
        embed_photos()
        for name in ("train.npy", "val.npy"):
            assert (place / name).read_bytes() == files[name]
    finally:
        for name, content in files.items():
            (place / name).write_bytes(content)


JSON_FILE = st.one_of(spoilt_tree(INFO).map(lambda tree: bytes_of(json.dumps(tree))), spoilt(json.dumps(INFO).encode()))
LINES = st.lists(st.one_of(st.sampled_from(METRICS), JSON), max_size=4).map(
    lambda records: b"\n".join(bytes_of(json.dumps(record)) for record in records)
)
CELLS = st.one_of(WORDS, st.sampled_from(["1.png", "a", "train", "a;b", '"', "=1", "2.png\n"]))
TABLES = st.lists(st.one_of(st.sampled_from(ROWS), st.lists(CELLS, max_size=5)), max_size=6).map(
    lambda rows: bytes_of("\n".join(",".join(row) for row in rows))
)
READERS = {
    "checkpoints": (spoilt(st.sampled_from(TORCH_FILES)), checkpoint),
    "names and shapes": (spoilt_contents(), opened),
    "safetensors": (spoilt_tree(HEADER).map(safetensors_file), checkpoint),
    "TensorFlow": (tensorflow_index(), tensorflow),
    "recipes": (st.one_of(spoilt_tree(RECIPE), spoilt(json.dumps(RECIPE, indent=1).encode())), recipe),
    "cards": (st.one_of(spoilt_tree(CARD), spoilt(json.dumps(CARD, indent=1).encode())), card),
    "CSV files": (st.one_of(TABLES, spoilt(TABLES)), csv_file),
    "images": (spoilt(st.sampled_from([picture(f) for f in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")])), image),
    "label files": (st.one_of(spoilt(b"a/1.png\na/2.png\n"), JSON.map(lambda v: bytes_of(json.dumps({"ids": v})))),
                    label_file),
    "run folders": (st.tuples(JSON_FILE, st.one_of(LINES, spoilt(LINES)), st.one_of(JSON_FILE, st.binary(max_size=9))),
                    run_folder),
    "kept features": (spoilt_store(), kept_features),
    "exports": (st.tuples(st.one_of(spoilt_tree(CONFIG), spoilt(json.dumps(CONFIG).encode())), st.booleans()), export),
}  # fmt: skip


def check(reader, drawn, folder):
    """A value, or one short sentence, within the bound."""
    signal.setitimer(signal.ITIMER_PROF, BOUND)
    try:
        READERS[reader][1](drawn, folder)
    except (Problem, BadImage) as refused:
        sentences = getattr(refused, "sentences", (str(refused),))
        assert sentences
        assert all(sentences)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.fixture(autouse=True)
def late():
    def stop(*_):
        pytest.fail(f"{BOUND} seconds of the processor are over")

    before = signal.signal(signal.SIGPROF, stop)
    yield
    signal.signal(signal.SIGPROF, before)


def explore(reader, folder, rounds):
    for number in rounds:

        @seed(number)
        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(READERS[reader][0])
        def one(drawn):
            check(reader, drawn, folder)

        one()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore")  # Pillow's, of odd images
def test_what_strangers_send_is_read_or_refused(reader, tmp_path):
    explore(reader, tmp_path, [0])


def until(end):
    """Numbers of rounds, until the time is over."""
    number = time.time_ns() % 10**6
    while time.monotonic() < end:
        yield number
        number += 1


@pytest.mark.slow
@pytest.mark.skipif(not SECONDS, reason="FINETUNE_MILE_FUZZ_SECONDS says how long")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore")
def test_what_strangers_send_is_read_or_refused_for_longer(reader, tmp_path):
    explore(reader, tmp_path, until(time.monotonic() + SECONDS))


# Found by these or by the audits, and mended: (reader, what was drawn).
FOUND = [
    ("recipes", b"a: &a {b: *a}\n"),
    ("recipes", b"a: " + b"[" * 10_000),
    ("recipes", {"steps": "9" * 400}),
    ("cards", {**CARD, "preprocess": {"std": [0, 0, 0]}}),
    ("cards", b"\xff"),
    ("CSV files", b"file,label\n1.png,\x00\n"),
    ("CSV files", b"file,label\n1.png,a\n1.png,a\n2.png,b\n"),
    ("label files", b'{"ids": 5}'),
    ("label files", b"\xfd7zXZ\x00"),
    ("label files", b"[" * 100_000),
    ("run folders", (b"5", b"5\n[]\n", b"[]")),
    ("run folders", (b'{"seconds": "x"}', b"\xff\n{}\n", b"")),
    ("run folders", (b'{"requested": 5}', b'{"kind": 1, "step": 1}\n{}', b"9" * 5000)),
    ("exports", (b'{"arch": 5}', True)),
    ("exports", ({**CONFIG, "size": 8000}, False)),
    ("exports", ({**CONFIG, "arch": "resnet18w99999999"}, True)),
    ("exports", (b"[" * 100_000, False)),
    ("safetensors", safetensors_file({"." * 5000: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})),
    ("safetensors", safetensors_file({"a": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}})),
    ("images", picture("JPEG")[:200]),
    ("images", b""),
]


@pytest.mark.parametrize(("reader", "drawn"), FOUND)
def test_what_was_found_stays_mended(reader, drawn, tmp_path):
    check(reader, drawn, tmp_path)
