"""The pages that are neither of a run nor of an audit, in a real browser, made by their commands."""

import shutil

import numpy as np
import pytest
from browser import MARKUP
from shortcuts import COLOURS, ROOT, tinted

from finetune_mile.cli import main
from finetune_mile.training import plan, quickstart

LITTLE = ["--size", "24", "--workers", "0"]


def photos(root):
    """Two classes; names of one and of its files are markup."""
    draw = np.random.default_rng(0)
    for name, tint in zip(("red", MARKUP), COLOURS.values(), strict=False):
        for part, count in (("train", 8), ("val", 6)):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                tinted(draw, tint, 60).save(root / part / name / f"{number}{MARKUP}.png")
    return root


def quickstart_page(root):
    assert main(["quickstart", str(photos(root / MARKUP)), "--init", "simclr-demo", "--out", str(root / "out"), *LITTLE,
                 "--minutes", "0.05"]) == 0  # fmt: skip
    return root / "out/quickstart.html"


def probe_page(root):
    page = root / "probe.html"
    given = ["--data", f"folder:{photos(root / MARKUP)}", "--seeds", "1", "--html", str(page), *LITTLE]
    assert main(["probe", "--init", "simclr-demo", *given]) == 0
    return page


def pretrain_page(root):
    out = root / MARKUP
    flags = ["--data", "demo:40", "--arch", "resnet-mini", "--steps", "4", "--batch-size", "8", "--set", "workers=0"]
    assert main(["pretrain", *flags, "--set", "log_every=1", "--out", str(out)]) == 0
    return out / "report.html"


def ledger_page(root):
    """The largest of the committed ledgers, in which a name of a row is markup."""
    folder = max((ROOT / "docs/tables").iterdir(), key=lambda path: (path / "runs.jsonl").stat().st_size)
    out = shutil.copytree(folder, root / "ledger")
    table = root / f"{folder.name}.yaml"
    shutil.copy(ROOT / f"recipes/tables/{folder.name}.yaml", table)
    table.write_text(table.read_text().replace("\ntitle: ", f"\ntitle: {MARKUP} ", 1))
    assert main(["table", str(table), "--out", str(out), "--format", "html"]) == 0
    return out / "ledger.html"


PAGES = {
    "quickstart.html": quickstart_page, "probe.html": probe_page, "pretrain.html": pretrain_page,
    "ledger.html": ledger_page,
}  # fmt: skip


@pytest.mark.parametrize("template", PAGES)
def test_a_page_is_sound(browser, rendered, monkeypatch, tmp_path, template):
    monkeypatch.setattr(quickstart, "SEEDS", 1)
    monkeypatch.setattr(plan, "LEAST_STEPS", 40)
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    browser.is_sound_everywhere(PAGES[template](tmp_path))
    assert MARKUP in browser.run("return document.title + document.body.textContent")
    pictures = "return [...document.images].every((each) => each.complete && each.naturalWidth > 0)"
    browser.wait(lambda: browser.run(pictures))


def test_every_page_is_opened_by_a_test():
    templates = {path.name for path in (ROOT / "finetune_mile/pages/templates").glob("*.html")}
    assert templates == {*PAGES, "audit.html", "report.html", "compare.html", "base.html", "parts.html"}
