"""recipes/upstream.yaml: what upstream says of every setting that changes a number, so that no recipe drifts."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from shortcuts import ROOT
from upstream_values import Entry, compare, main, read_upstream

from finetune_mile.paper.tables.description import find_table, read_table
from finetune_mile.paper.tables.runs import make_jobs, resolve_all

CELLS = {"ssl": 42, "semi": 12, "imagenet": 32}
# What a cell is, and what leaves the final score as it is.
NO_NUMBER = {
    "data", "init", "arch", "teacher", "truth", "fraction", "method", "variant", "seed", "workers", "checkpoint_every",
    "log_every", "track", "evaluate.images", "evaluate.every", "evaluate.points", "evaluate.labels",
}  # fmt: skip


def cells(name):
    table = read_table(find_table(name))
    jobs = make_jobs(table, Path(table.runs), {})
    return [(job.key.cell, meaning) for job, meaning in zip(jobs, resolve_all(jobs), strict=True)]


def name_of(meaning):
    path = meaning.resolved.path
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_has_upstreams_value_beside_each_of_ours_and_none_has_drifted(name):
    found = cells(name)
    assert len(found) == CELLS[name]
    for cell, meaning in found:
        beside = compare(name_of(meaning), meaning.tree)
        said = [key for key in meaning.resolved.said_by if key in meaning.tree and key not in NO_NUMBER]
        assert [key for key in said if key not in beside] == [], f"{cell}: recipes/upstream.yaml lacks these"
        drifted = [f"{key} = {meaning.tree[key]}: {each.sentence}" for key, each in beside.items() if not each.expected]
        assert drifted == [], f"{cell}: the recipe is not what recipes/upstream.yaml says it is"


def test_a_recipe_that_drifts_is_seen():
    meaning = dict(cells("ssl"))["fine-tuning / swav / 1 %"]
    before = compare("ssl/swav", meaning.tree)["optimizer.lr"]
    assert (before.verdict, before.expected) == ("equal", True)
    after = compare("ssl/swav", {**meaning.tree, "optimizer.lr": 0.03})["optimizer.lr"]
    assert (after.verdict, after.expected) == ("ours", False)
    assert after.sentence == "ours (upstream 0.02, facebookresearch/swav 06b1b7c README.md:137)"
    changed = compare("ssl/swav", {**meaning.tree, "head_bias": "zero"})["head_bias"]
    assert not changed.expected, "a choice of ours is pinned too"


def test_every_value_names_repository_commit_file_and_line():
    upstream = read_upstream()
    for source in upstream.sources.values():
        assert bool(source.paper) != bool(source.repository and len(source.commit) == 40)
    for recipe in upstream.recipes:
        for key, entries in upstream.entries(recipe).items():
            assert entries[-1].when == {}, f"{recipe}: {key}: the last entry is for all other cells"
            for entry in entries:
                if entry.value in ("unknown", "absent"):
                    assert "ours" in entry.model_fields_set
                elif upstream.sources[entry.source].repository:
                    assert ":" in entry.at or entry.at.startswith("issue ")
                    assert entry.says or entry.at.startswith("issue ")
    with pytest.raises(ValidationError, match="needs source: and at:"):
        Entry(value=3)
    with pytest.raises(ValidationError, match="needs ours:"):
        Entry(value="unknown")


@pytest.mark.parametrize("name", CELLS)
def test_the_tool_prints_upstreams_values_beside_ours(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["upstream_values", name])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    totals = [re.findall(r"(\d+) (equal|ours|unknown)", line) for line in lines if not line.startswith("  ")]
    assert len(totals) == CELLS[name]
    verdicts = [found[1] for line in lines if (found := re.search(r" = .*?   \[(equal|ours|unknown)", line))]
    counted = Counter(verdicts)
    assert counted == {word: sum(int(n) for total in totals for n, w in total if w == word) for word in counted}
    assert min(int(total[0][0]) for total in totals) >= 14
    if name == "ssl":
        text = "\n".join(lines)
        assert "optimizer.lr = 0.16   [equal (google-research/simclr 383d414 README.md:160" in text
        assert "optimizer.lr = 0.064   [unknown (memory of the SimCLR-v2 paper" in text


def test_the_lines_of_upstream_say_so():
    """With FINETUNE_MILE_UPSTREAM, a folder of git directories owner+name, every cited line is looked up."""
    folder = os.environ.get("FINETUNE_MILE_UPSTREAM")
    if folder is None:
        pytest.skip("FINETUNE_MILE_UPSTREAM is not set: a folder of git directories named owner+name")
    upstream, files = read_upstream(), {}
    raw = yaml.safe_load((ROOT / "recipes/upstream.yaml").read_text())
    entries = [e for family in raw["recipes"].values() for v in family["values"].values()
               for e in (v if isinstance(v, list) else [v])]  # fmt: skip
    wrong = []
    for entry in entries:
        source = upstream.sources.get(entry.get("source", ""))
        if source is None or not source.repository or ":" not in entry["at"]:
            continue
        file, line = entry["at"].rsplit(":", 1)
        path = source.files.get(file, file)
        if (source.repository, path) not in files:
            where = Path(folder) / source.repository.replace("/", "+")
            git = ["git", f"--git-dir={where / 'repo' if (where / 'repo').is_dir() else where}", "show"]
            shown = subprocess.run([*git, f"{source.commit}:{path}"], capture_output=True, text=True, check=True)
            files[source.repository, path] = shown.stdout.splitlines()
        text = files[source.repository, path][int(line) - 1]
        if str(entry["says"]) not in text:
            wrong.append(f"{source.repository} {path}:{line} has no {entry['says']!r}: {text.strip()}")
    assert wrong == []
    assert len(files) > 15
