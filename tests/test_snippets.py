"""Every snippet of the documents: commands are read by the real parsers, Python is executed, here or where it says."""

import argparse
import builtins
import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import timm
import torch
import yaml
from idx_files import write_mnist
from safetensors.torch import load_file
from shortcuts import COLOURS, ROOT, tinted_photos
from snippets import blocks, lines, parts_of, run_python, run_shell
from torch.utils._pytree import tree_map

from finetune_mile import cli
from finetune_mile.networks.heads import build

sys.path.append(str(ROOT / "tests/checkpoints"))
from bundles import write_bundle
from samples import SAMPLES

FOLDERS = ("*.md", "docs/*.md", "docs/tutorials/*.md", "docs/howto/*.md", "docs/reference/*.md")
PAGES = {str(path.relative_to(ROOT)): path.read_text() for each in FOLDERS for path in sorted(ROOT.glob(each))}
# Commands that no test executes as they are written, by how they begin, and why.
NOT_EXECUTED = {
    "python3 -m venv": "makes an environment; tests/test_wheel.py does so",
    "python -m venv": "the same",
    ". .venv": "the same",
    "pip install": "needs the network; tests/test_wheel.py installs",
    "PEERS/bin/pip": "needs the network",
    "python benchmarks/peers/": "needs other tools: fastai and LightlyTrain",
    "pytest": "these tests",
    "ruff": "see .ci/run",
    "mypy": "see .ci/run",
    "lint-imports": "see tests/test_house.py",
    "python -m sphinx": "see tests/test_site.py",
    "python -m tests.faults.strangers": "takes minutes; tests/faults has short forms",
    "python tests/faults/": "the same",
    "FINETUNE_MILE_FUZZ_SECONDS": "the same",
    "export IMAGENET_DIR": "the tree of these tests is in another place",
    "finetune-mile probe --init moco.pth.tar --init timm:": "needs the network, for timm's weights",
    "accelerate launch --config_file recipes/launch/": "needs GPUs, or several machines",
}
# Documents with Python, and the test that executes it.
PYTHON = {
    "README.md": "tests/test_snippets.py",
    "docs/python.md": "tests/commands/test_python_page.py",
    "docs/features.md": "tests/commands/test_embed.py",
    "docs/start.md": "tests/test_snippets.py",
    "docs/tutorials/own-loop.md": "tests/test_snippets.py",
}

LIKE_RUN = ("check",)  # take the flags of run beside their own


class Read(Exception):
    """Raised by a parser that has read its words: a command goes no further."""


@pytest.fixture
def only_read(monkeypatch):
    """Commands stop where their words are read, with `Read(what was not understood)`."""
    original = argparse.ArgumentParser.parse_known_args

    def read(self, args=None, namespace=None):
        _, rest = original(self, args, namespace)
        raise Read(rest)

    @contextlib.contextmanager
    def stop():
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", read)
            yield

    return stop


def without_launcher(words):
    """(verb, its words) of a command of ours, however it is started; None for another program's."""
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words[0] == "finetune-mile":
        return words[1], words[2:]
    if words[0] in ("accelerate", "torchrun"):
        at = next(i for i, word in enumerate(words) if word in ("finetune_mile/run.py", "finetune_mile.run", "-m"))
        rest = words[at + 1 :]
        if words[at] == "-m":
            module, *rest = rest
            return (rest[0], rest[1:]) if module == "finetune_mile.cli" else ("run", rest)
        return "run", rest
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        return words[1], words[2:]
    return None


def all_commands():
    found = [
        (page, one)
        for page, text in PAGES.items()
        for line in lines(text)
        if (one := without_launcher(shlex.split(parts_of(line)[1])))
    ]
    assert len(found) > 50
    return found


@pytest.mark.parametrize(("page", "command"), all_commands(), ids=lambda value: str(value)[:60])
def test_a_command_of_a_document_is_understood(page, command, only_read, monkeypatch, tmp_path, capsys):
    verb, words = command
    monkeypatch.setattr(sys, "argv", [verb, *words])
    monkeypatch.setenv("IMAGENET_DIR", str(tmp_path))
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    if verb == "run" and "--resume" not in words:
        check_settings(words, capsys)
        return
    start = partial(cli.main, [verb, *words])
    if verb.startswith("benchmarks/"):
        monkeypatch.syspath_prepend((ROOT / verb).parent)
        start = partial(runpy.run_path, str(ROOT / verb), run_name="__main__")
    with only_read(), pytest.raises(Read) as read:
        start()
    (rest,) = read.value.args
    if verb in LIKE_RUN:
        check_settings(rest, capsys)
    else:
        assert rest == [], f"{page}: {rest}"


def check_settings(words, capsys):
    """`run` with these words gets as far as its settings, without data or weights."""
    assert cli.main(["run", *(word for word in words if word != "--explain"), "--explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_command_that_is_wrong_is_found(only_read):
    with only_read(), pytest.raises(Read) as read:
        cli.main(["predict", "runs/mine", "holiday/", "--formt", "csv"])
    assert read.value.args == (["--formt", "csv"],)
    assert cli.main(["run", "--set", "mile.roh=0.5", "--explain", "--json"]) == 2


def test_commands_in_a_sentence_name_verbs_and_flags_that_exist():
    known = json.loads((ROOT / "tests/golden_flags.json").read_text())
    found = 0
    for page, text in PAGES.items():
        if page == "CHANGELOG.md":  # has what there was
            continue
        for words in re.findall(r"`finetune-mile ([a-z][^`]*)`", text):
            verb = "run" if words.split()[0] == "train" else words.split()[0]
            assert verb in cli.VERBS, f"{page}: {words}"
            names = (verb, "run") if verb in LIKE_RUN else (verb,)
            flags = {flag for name in known if name.split()[0] in names for flag in known[name]}
            assert set(re.findall(r"--[a-z][a-z-]*", words)) <= flags, f"{page}: {words}"
            found += 1
    assert found > 20


def test_commands_are_in_bash_blocks_and_yaml_is_yaml():
    for page, text in PAGES.items():
        for block in blocks(text, ""):
            assert not re.search(r"^(finetune-mile|accelerate|python) ", block, re.M), f"{page}: mark it as bash"
        for block in blocks(text, "yaml"):
            assert yaml.safe_load(block), page


def test_python_of_documents_is_executed_by_a_test():
    assert {page for page, text in PAGES.items() if blocks(text, "python")} == PYTHON.keys()
    for page, test in PYTHON.items():
        assert page in (ROOT / test).read_text()


# ------------------------------------------------------------------------------------- executed, on very small images

# Documents whose commands are executed by a test of their own.
ELSEWHERE = {
    "docs/audit.md": "tests/commands/test_audit_command.py",
    "docs/predict.md": "tests/commands/test_predict.py",
    "docs/export.md": "tests/commands/test_export.py",
    "docs/start.md": "tests/test_snippets.py",
}
EXECUTED = {
    page: [line for line in lines(text) if not line.startswith(tuple(NOT_EXECUTED))] for page, text in PAGES.items()
}

SMALL = ["--size", "24"]
FEW = ["--steps", "20", "--batch-size", "8"]
FEW += ["--set=precision=no", "--set=workers=0", "--set=evaluate.images=20", "--set=evaluate.labels=false"]
SHORT = [*SMALL, *FEW, "--steps", "6", "--k-t", "2", "--k-s", "2", "--set=mile.warmup=0"]
MORE = {
    "quickstart": ["--minutes", "0.2", "--workers", "0"],
    "run": SHORT,
    "check": SHORT,
    "embed": SMALL,
    "probe": SMALL,
    "pretrain": ["--steps", "2", "--batch-size", "8", "--set", "size=24", "--set", "workers=0"],
    "benchmarks/initialisation.py": SMALL,
    "benchmarks/sizes.py": ["--sizes", "24", "--trunks", "frozen", "--fraction", "1.0", "--record", "sizes.jsonl"],
    "benchmarks/own_photos.py": [*SMALL, "--fractions", "1.0", "--methods", "mile", "--seeds", "1",
                                 "--runs", "own", "--record", "own.jsonl"],
}  # fmt: skip
ONE_CELL = {
    "mini-ssl": "grids/scratch sigmoid",
    "multi-mnist": "plain CNN/Sigmoid",
    "auto": "plain CNN/Sigmoid",
    "ood": "ColoredMNIST+/ERM",
}


def shorter(words):
    """The words that make a command of a document short; of a table, one cell of --quick is trained."""
    verb, rest = without_launcher(words) or ("", [])
    if verb == "table":
        if {"--dry-run", "--commands", "--format"} & set(rest):
            return []
        if "--quick" not in rest:
            return ["--dry-run"]
        seed = {"auto": "20", "ood": "10"}.get(rest[0], "0")
        return ["--only", ONE_CELL[rest[0]], "--seeds", seed, "--set", "steps=4", "--no-prices"]
    verb = "run" if verb == "train" else verb
    if verb == "check" and not {"--init", "--table"} & set(rest):  # the data alone
        return ["--workers", "0"]
    if ("--resume" in rest and "auto" not in rest) or (verb == "check" and "--table" in rest):
        return []
    if "--minutes" in rest and verb == "run":  # it chooses steps and size; test_fetching.py downloads a dinov2-s
        return ["--minutes", "0.05", "--init", "moco.pth.tar", "--set=workers=0", "--set=precision=no"]
    if "unlabelled" in rest:  # the recipe of that name: another method
        return [*SMALL, *FEW]
    if "--recipe" in rest and "--init" not in rest:
        return [*FEW, *(["--k-t", "4", "--k-s", "4"] if "mile" in rest else [])]
    if "dinov2-s" in rest and verb == "run":
        return [*SHORT, "--init", "moco.pth.tar"]
    if verb == "run" and "sigmoid" in rest:  # no k_t and k_s
        return [*SMALL, *FEW, "--steps", "6"]
    imagenet = verb in ("run", "check") and "--init" in rest and "--data" not in rest
    gentle = ["--split", "list.txt", "--lr", "1e-4", "--set=optimizer.head_lr=1e-4"]  # the weights are random
    return [*MORE.get(verb, ()), *(gentle if imagenet else [])]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """A folder with what the documents take for granted, all of it tiny: photos, digits, ImageNet, checkpoints."""
    root = tmp_path_factory.mktemp("documents")
    for name in ("benchmarks", "finetune_mile", "recipes", "tests"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs/tables/mini-ssl", root / "docs/tables/mini-ssl")
    tinted_photos(root / "photos", noise=60)
    for name in ("CLOTHING", "CIFAR"):
        (root / name).symlink_to(root / "photos")
    for name in ("holiday", "fresh", "DIR/test", "GROCERY/test/fruit"):
        shutil.copytree(root / "photos/val", root / name)
    for name in ("corrected", "more", "REST", "DIR/train", "GROCERY/train/fruit"):
        shutil.copytree(root / "photos/train", root / name)
    shutil.copy(root / "photos/val/red/0.png", root / "photo.jpg")
    files = [f"{name}/{number}.png" for name in COLOURS for number in range(10)]
    (root / "test_index_to_file.csv").write_text("\n".join(["file", *files]))
    np.save(root / "cifar10h-counts.npy", np.eye(3)[[name // 10 for name in range(30)]])
    sets = [f"photos/{part}/{name}/{i}.png,{name}{';blue' * (i % 2)},{part}\n"
            for part in ("train", "val") for name in COLOURS for i in range(10)]  # fmt: skip
    (root / "photos.csv").write_text("file,labels,split\n" + "".join(sets).replace("blue;blue", "blue"))
    (root / "data").mkdir()
    write_mnist(root / "data/mnist", 200, 100)
    write_mnist(root / "DIR", 200, 100)
    for part, count in (("train", 100), ("val", 10)):  # as ImageNet's are named; 1 % of them are in the list
        for number, name in enumerate(COLOURS):
            folder = root / f"ILSVRC2012/{part}/n{number:08}"
            folder.mkdir(parents=True)
            for i in range(count):
                os.link(root / f"photos/{part}/{name}/{i % 20}.png", folder / f"{folder.name}_{i}.png")
    (root / "list.txt").write_text("".join(f"n{number:08}_0.png\n" for number in range(3)))

    demo = load_file(ROOT / "weights/simclr-demo.safetensors")
    own = root / "runs/pretrain-1/export/model.safetensors"
    own.parent.mkdir(parents=True)
    shutil.copy(ROOT / "weights/simclr-demo.safetensors", own)
    for name in ("moco.pth.tar", "model.pth", "imgsim/model.pth"):
        (root / name).parent.mkdir(exist_ok=True)
        torch.save(demo, root / name)
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=24, patch_size=8, depth=2, num_classes=0)
    torch.save({"model": {**vit.state_dict(), "mask_token": torch.zeros(1, 1, 8)}}, root / "mae.pth")
    solo = root / "trained_models/byol/1a2b/byol-1a2b-ep=399.ckpt"
    vissl = root / "checkpoints/model_final_checkpoint_phase199.torch"
    zoo = root / "cache/weights/vissl-swav-800ep/model_final_checkpoint_phase799.torch"
    for path in (solo, vissl, zoo):
        path.parent.mkdir(parents=True)
    torch.save(tree_map(random, SAMPLES["solo-learn"]().tree), solo)
    trunk = {f"_feature_blocks.{name}": value for name, value in build("resnet50").state_dict().items()}
    torch.save({"classy_state_dict": {"base_model": {"model": {"trunk": trunk, "heads": {}}}}}, vissl)
    zoo.symlink_to(vissl)
    tree = {name: value for name, value in SAMPLES["simclr-tf"]().tree.items() if not name.startswith("ema_model")}
    arrays = {name: random(value).numpy() for name, value in tree.items()}
    write_bundle(root / "cache/weights/simclrv2-sk1/model.ckpt-250228", arrays)
    return root


def random(value):
    """Positive, because some are variances."""
    return value if not isinstance(value, torch.Tensor) or value.dtype == torch.int64 else torch.rand(value.shape) / 10


@pytest.fixture
def place(stand_ins, monkeypatch):
    monkeypatch.chdir(stand_ins)
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(stand_ins / "cache"))
    monkeypatch.setenv("FINETUNE_MILE_CONFIG", str(stand_ins / "config"))
    monkeypatch.setenv("IMAGENET_DIR", str(stand_ins / "ILSVRC2012"))
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor", lambda _: contextlib.nullcontext(builtins))
    outside = subprocess.run

    def run(words, **options):
        """The runs of benchmarks/ are executed in this process, which is much faster."""
        if words[:2] != [sys.executable, str(ROOT / "finetune_mile/run.py")]:
            return outside(words, **options)
        return subprocess.CompletedProcess(words, cli.main(["run", *words[2:], *FEW]), "", f"failed: {words}")

    monkeypatch.setattr(subprocess, "run", run)
    return stand_ins


def test_every_command_is_executed_or_listed():
    """What a page has and NOT_EXECUTED does not is executed: by a test below, or by the one in ELSEWHERE."""
    every = [line for text in PAGES.values() for line in lines(text)]
    assert [begin for begin in NOT_EXECUTED if not any(line.startswith(begin) for line in every)] == []
    for page, test in ELSEWHERE.items():
        assert f'run_shell(ROOT / "{page}"' in (ROOT / test).read_text()
        assert EXECUTED[page] == lines(PAGES[page]) or page == "docs/start.md"  # which installs first
    for page in (page for folder in ("docs", "finetune_mile", "tests") for page in (ROOT / folder).rglob("*.md")):
        assert str(page.relative_to(ROOT)) in PAGES or lines(page.read_text()) == [], page


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, executed in EXECUTED.items() if executed and page not in ELSEWHERE])
def test_the_commands_of_a_document(page, place, monkeypatch, capsys):

    def anew(words):
        """`shorter`, without the run that another page of this process has left there."""
        verb, rest = without_launcher(words) or ("", [])
        if verb == "run" and "--out" in rest and "--resume" not in rest:
            shutil.rmtree(rest[rest.index("--out") + 1], ignore_errors=True)
        return shorter(words)

    done = run_shell(ROOT / page, monkeypatch, anew, NOT_EXECUTED)
    assert {line: out[-2000:] for line, (code, out) in done.items() if code} == {}
    assert list(done) == EXECUTED[page]
    if page == "README.md":
        run_python(ROOT / page)
        assert "('red', " in capsys.readouterr().out
        assert (place / "runs/mine/report.html").is_file()


@pytest.mark.slow
def test_the_first_page_for_somebody_without_photos(tmp_path, monkeypatch, capsys):
    """docs/start.md from top to bottom in an empty folder: its sample, its commands, its Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    sample, predict = blocks(PAGES["docs/start.md"], "python")
    names = {}
    exec(compile(sample, "docs/start.md", "exec"), names)
    done = run_shell(ROOT / "docs/start.md", monkeypatch, shorter, NOT_EXECUTED)
    assert {line: out[-2000:] for line, (code, out) in done.items() if code} == {}
    assert "temple-40.jpg" in list(done.values())[-1][1]
    exec(compile(predict, "docs/start.md", "exec"), names)
    assert "('flower', " in capsys.readouterr().out


@pytest.mark.slow
def test_the_own_loop_of_the_tutorial(place, capsys):
    names = {}
    for block in blocks(PAGES["docs/tutorials/own-loop.md"], "python"):
        exec(compile(block, "docs/tutorials/own-loop.md", "exec"), names)
    assert "phases, last loss" in capsys.readouterr().out
    assert 0 <= names["scores"]["accuracy"] <= 100


def test_a_how_to_is_short():
    for page, text in PAGES.items():
        if page.startswith("docs/howto/"):
            assert len(text.split()) <= 800, page
