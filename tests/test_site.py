"""docs/ as a site: it builds without a warning, every page is in its menu, what is written from code is fresh."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from reference_pages import FOLDER, MEANING, PRETRAINED, known_key, pages
from shortcuts import ROOT, SHORT, SHORT_MILE, tinted_photos

DOCS = ROOT / "docs"


def index():
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return dict(conf.menu((DOCS / "index.md").read_text()))


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path):
    """Sphinx checks every link between pages and every anchor. About half a minute on a quiet core."""
    for name in ("sphinx", "furo", "myst_parser"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f'needs {name}: pip install -e ".[docs]"')
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    for page in DOCS.rglob("*.md"):
        built = tmp_path / "site" / page.relative_to(DOCS).with_suffix(".html")
        html = built.read_text()
        outside = re.findall(r'<(?:script|img|link|source|iframe)\b[^>]*(?:src|href)="(https?:[^"]*)"', html)
        assert outside == [], f"{page} asks the network"
    for target in re.findall(r"\]\(docs/([^)]+)\)", (ROOT / "README.md").read_text()):
        page, _, anchor = target.partition("#")
        if anchor:
            assert f'id="{anchor}"' in (tmp_path / f"site/{page[:-3]}.html").read_text(), target


def test_a_broken_link_is_a_warning(tmp_path):
    if importlib.util.find_spec("myst_parser") is None:
        pytest.skip('needs myst_parser: pip install -e ".[docs]"')
    (tmp_path / "conf.py").write_text(
        (DOCS / "conf.py").read_text().replace('"furo"', '"basic"').replace('["_static"]', "[]")
    )
    (tmp_path / "index.md").write_text("# A\n\n## B\n\n- [c](c.md)\n\n[no heading](c.md#nowhere), [no page](d.md)\n")
    (tmp_path / "c.md").write_text("# C\n")
    (tmp_path / "lost.md").write_text("# In no menu\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(tmp_path), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    for words in ("nowhere", "d.md", "lost.md"):
        assert words in done.stderr


def test_every_page_is_in_the_menu_once():
    listed = [page for found in index().values() for page in found]
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")} - {"index"}


def test_the_readme_leads_to_each_section():
    linked = set(re.findall(r"\]\(docs/([^)#]+)\.md", (ROOT / "README.md").read_text()))
    assert "index" in linked
    for title, found in index().items():
        assert linked & set(found), f"README links no page of {title}"


def test_the_reference_is_fresh():
    for path, text in pages().items():
        assert path.read_text() == text, f"python -m tests.reference_pages writes {path.name} anew"


def test_every_setting_has_a_meaning():
    rows = re.findall(r"^\| `([\w.]+)` .*\| *([^|]*) \|$", (FOLDER / "settings.md").read_text(), re.M)
    assert len(rows) > 100
    assert [key for key, meaning in rows if not meaning] == []


RUNS = {
    "sets": [*SHORT_MILE, "--set", "evaluate.thresholds=[0.3]"],
    "folder": [*SHORT, "--data", "folder:photos", "--method", "softmax", "--init", "simclr-demo", "--trunk", "frozen",
               "--patience", "2", "--set", "evaluate.every=4"],
    "several": [*SHORT, "--data", "csv:several.csv", "--method", "sigmoid", "--init", "simclr-demo"],
}  # fmt: skip


def test_the_page_has_every_key_that_a_run_writes(run_demo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    tinted_photos(tmp_path / "photos", noise=60)
    (tmp_path / "photos/val").rename(tmp_path / "photos/test")
    tinted_photos(tmp_path / "more", noise=60)
    (tmp_path / "more/val").rename(tmp_path / "photos/val")
    (tmp_path / "photos/val/red/x.heic").write_bytes(b"")
    lines = [
        f"photos/train/{name}/{i}.png,{name}{';green' * (i % 2)},{'val' if i > 14 else 'train'}"
        for i in range(20)
        for name in ("red", "blue")
    ]
    (tmp_path / "several.csv").write_text("\n".join(["file,labels,split", *lines]))
    seen = set()
    for name, flags in RUNS.items():
        if name != "sets":  # from a checkpoint
            flags = [word for word in flags if word not in ("--arch", "resnet-demo")] + ["--head-init", "probe"]
        seen |= json.loads((run_demo(name, *flags) / "results.json").read_text()).keys()
    assert {key for key in seen if not known_key(key)} == set()
    for key in ("f1@0.3", "f1@rho", "chosen_step", "test_accuracy_low", "probe_map", "f1@chosen"):
        assert key in seen, f"{key}: these runs should have it"
    assert not known_key("accuracy_of_something_new")


def test_the_page_has_every_key_of_the_ledgers_and_no_key_that_nothing_writes():
    texts = [path.read_text() for path in DOCS.glob("tables/*/runs.jsonl")]
    ledgers = [json.loads(line) for text in texts for line in text.splitlines()]
    seen = {key for line in ledgers for key in line["results"] or {}}
    assert {key for key in seen if not known_key(key)} - PRETRAINED.keys() == set()
    assert {"main_accuracy", "neighbours"} <= seen
    code = "".join(path.read_text() for path in (ROOT / "finetune_mile").rglob("*.py"))
    for key in MEANING:
        word = re.sub(r"^(test_|f1_)|@.*", "", key)
        assert word in code, f"nothing writes {key}"
