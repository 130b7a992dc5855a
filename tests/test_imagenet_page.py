"""docs/imagenet.md: its tables are of the cards and recipes, its appendix names tests that exist.

`python -m tests.test_imagenet_page` writes the tables anew.
"""

import re
from functools import cache
from pathlib import Path

import torch

from finetune_mile.checkpoints.cards import SCRATCH, find_card
from finetune_mile.networks.heads import build, new_head
from finetune_mile.paper.tables.description import find_table, read_table
from finetune_mile.paper.tables.runs import make_jobs, resolve_all
from finetune_mile.training.memory import Need, copies, kept_per_image, numbers_in
from finetune_mile.training.pricing import count, find_data, find_weights
from finetune_mile.training.task import lay_out

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/imagenet.md"
FAMILIES = ("simclr", "byol", "swav", "mocov2", "simclrv2-sk0", "simclrv2-sk1")
GPUS = 8
SPEED = GPUS * 1000  # images a second
FORWARD = 0.3  # of a step: what a forward pass of one image costs
FINDINGS = 18


def line(*cells):
    return f"| {' | '.join(cells)} |"


def check_points():
    """Published accuracies: the cards', and the baselines of the paper's table where they have none."""
    block = next(block for block in read_table(find_table("ssl")).blocks if block.name == "fine-tuning")
    for name in FAMILIES:
        card = find_card(name)
        linear, knn = (f"{value:g}" if value is not None else "" for value in (card.linear_top1, card.knn_top1))
        tuned = [
            f"{card.finetune_top1[key]:g}"
            if key in card.finetune_top1
            else f"{block.paper[name][column]['accuracy']:g} *"
            for key, column in (("0.01", "1 %"), ("0.1", "10 %"), ("1.0", "100 %"))
        ]
        yield line(f"`{name}`", linear, knn, *tuned)


@cache
def sizes_of(arch, padding, size):
    """Numbers in a network, and bytes that it keeps of an image in bf16."""
    with torch.device("meta"):  # no numbers are needed
        network = build(arch, padding=padding)
        new_head(network, 1000, "prior")
    network.to_empty(device="cpu")
    return numbers_in(network), kept_per_image(network, size, half=True)


def work():
    """Memory, steps, millions of images that are trained on, and the time at SPEED, of each cell of the tables."""
    for name in ("ssl", "semi", "imagenet"):
        table = read_table(find_table(name))
        jobs = make_jobs(table, Path("runs"), {})
        rows = {}
        for job, meaning in zip(jobs, resolve_all(jobs), strict=True):
            named = meaning.resolved.recipe
            card = SCRATCH if named.init == "none" else find_card(named.init)
            recipe, data, _ = find_data(find_weights(named)[0])
            _, pools, plan = lay_out(recipe, data)
            work = count(recipe, plan, pools, len(data.val), len(data.classes))
            numbers, kept = sizes_of(recipe.arch, card.padding, recipe.size or card.preprocess.size)
            need = Need(4 * (2 + copies(recipe, plan.phases)) * numbers, kept).of(recipe.batch_size // GPUS)
            trained = plan.total_steps * recipe.batch_size
            hours = (trained + FORWARD * (work.teacher_images + work.evaluation_images)) / SPEED / 3600
            time = f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"
            row = name, job.key.row, recipe.arch, f"{recipe.batch_size:,}", f"{need / 1e9:.0f}"
            rows.setdefault(row, {})[job.key.column] = f"{plan.total_steps:,}; {trained / 1e6:.1f} M; {time}"
        for row, cells in rows.items():
            yield line(*row, *(cells.get(column, "") for column in ("1 %", "10 %", "100 %")))


def written():
    """The page with its tables as they should be."""
    text = PAGE.read_text()
    for title, rows in (("### Check points", check_points), ("## Hours", work)):
        start = text.index("|---", text.index(title))
        start = text.index("\n", start) + 1
        end = re.compile(r"^(?!\|)", re.M).search(text, start).start()
        text = text[:start] + "".join(f"{row}\n" for row in rows()) + text[end:]
    return text


def test_the_tables_are_of_the_cards_and_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("IMAGENET_DIR", raising=False)
    assert PAGE.read_text() == written(), "python -m tests.test_imagenet_page writes them"


def test_every_finding_is_mended_by_a_test_or_answered():
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| (mended|answered) \| ([^|]+) \|$", PAGE.read_text(), re.M)
    assert [int(number) for number, *_ in rows] == list(range(1, FINDINGS + 1))
    for number, state, answer in rows:
        tests = re.findall(r"`([a-z_/0-9]+\.py)::(test_\w+)`", answer)
        assert tests or state == "answered", number
        for file, name in tests:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (number, name)


if __name__ == "__main__":
    PAGE.write_text(written())
