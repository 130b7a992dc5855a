"""report.html of real runs, in a real browser: what it shows, what can be clicked; nothing is run or fetched."""

import base64
import csv
import json

import numpy as np
import pytest
from browser import MARKUP
from shortcuts import COLOURS, tinted

from finetune_mile.core.times import Times, bookkeeping, time_rows

FLAGS = [
    "--init", "none", "--arch", "resnet-demo", "--set", "size=24", "--set", "workers=0", "--batch-size", "8",
    "--steps", "16", "--set", "checkpoint_every=100", "--set", "log_every=2",
]  # fmt: skip


def class_folders(root, names, train=4, val=3):
    """Small photos in class folders; the tint of a class tells it."""
    draw = np.random.default_rng(0)
    for number, name in enumerate(names):
        tint = draw.integers(60, 200, 3) if number >= 3 else [*COLOURS.values()][number]
        for part, count in (("train", train), ("val", val)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for photo in range(count):
                ending = MARKUP if photo == 0 else str(photo)
                tinted(draw, tint, 30).save(folder / f"{part}{photo}{ending}.png")
    return f"folder:{root}"


def several_labels(root):
    """A list of photos with one or two labels; every fourth validation photo has none."""
    draw, names = np.random.default_rng(1), [*COLOURS, MARKUP]
    root.mkdir()
    with (root / "list.csv").open("w", newline="") as stream:
        lines = csv.writer(stream)
        lines.writerow(["file", "labels", "split"])
        for number in range(40):
            chosen = sorted({names[i] for i in draw.integers(0, 4, 2)})
            tinted(draw, draw.integers(60, 200, 3), 30).save(root / f"{number}.png")
            part = "val" if number % 2 else "train"
            lines.writerow([f"{number}.png", "" if number % 8 == 1 else ";".join(chosen), part])
    return f"csv:{root / 'list.csv'}"


def partly_unlabelled(root):
    """Photos with one label, of which some validation photos have none."""
    draw = np.random.default_rng(2)
    root.mkdir()
    with (root / "list.csv").open("w", newline="") as stream:
        lines = csv.writer(stream)
        lines.writerow(["file", "labels", "split"])
        for number in range(36):
            name, tint = [*COLOURS.items()][number % 3]
            tinted(draw, tint, 30).save(root / f"{number}.png")
            lines.writerow([f"{number}.png", "" if number % 4 == 3 else name, "val" if number % 2 else "train"])
    return f"csv:{root / 'list.csv'}"


KINDS = {
    "two": lambda root: (class_folders(root / "photos", ["cat", MARKUP], 8, 6), ["--method", "softmax"]),
    "hundred": lambda root: (
        class_folders(root / "photos", [f"class {n} with a long name" for n in range(99)] + [MARKUP], 1, 1),
        ["--method", "mile", "--k-t", "3", "--k-s", "2", "--set", "mile.warmup=0"],
    ),
    "several": lambda root: (several_labels(root / "photos"), ["--method", "sigmoid"]),
    "unlabelled": lambda root: (partly_unlabelled(root / "photos"), ["--method", "mile", "--k-t", "3", "--k-s", "1"]),
    "frozen": lambda root: (
        class_folders(root / "photos", ["cat", "dog", MARKUP], 8, 6),
        [
            "--method",
            "mile",
            "--k-t",
            "3",
            "--k-s",
            "1",
            "--init",
            "simclr-demo",
            "--trunk",
            "frozen",
            "--keep",
            "last",
        ],
    ),
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """The folder of a finished run of one of KINDS; each is made once."""
    from finetune_mile.run import main

    made = {}

    def make(kind):
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            data, flags = KINDS[kind](root)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FINETUNE_MILE_CACHE", str(root / "cache"))
                base = [word for word in FLAGS if "--init" not in flags or word not in ("--arch", "resnet-demo")]
                assert main([*base, "--data", data, *flags, "--out", str(root / "run")]) == 0
            made[kind] = root / "run"
        return made[kind]

    return make


def text_of(browser):
    return browser.run("return document.body.innerText")


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_sound_at_every_size_and_small(browser, run_of, kind):
    page = run_of(kind) / "report.html"
    browser.is_sound_everywhere(page)
    assert len(browser.find(".plot canvas")) == len(browser.find(".plot")) >= 2, "every chart is drawn"
    said = text_of(browser)
    assert "Next:" in said
    assert kind != "frozen" or "--trunk frozen) is as good" not in said, "that is what was done"
    assert not [word for word in ("over_probe", "knn_accuracy", "majority_accuracy") if word in said], (
        "names for people"
    )
    if kind != "unlabelled":
        assert MARKUP in browser.run("return document.body.textContent")
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run("return [...document.querySelectorAll('details.print')].every(each => each.open)")
    pdf = browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(pdf["data"]).startswith(b"%PDF")
    browser.is_sound()


def test_the_slider_updates_the_photos(browser, run_of):
    browser.open(run_of("several") / "report.html")

    def at(value):
        browser.run("const s = document.getElementById('threshold'); s.value = arguments[0];"
                    "s.dispatchEvent(new Event('input'))", value)  # fmt: skip
        return browser.run(
            "return [...document.querySelectorAll('.label[data-p]')].filter(label => label.offsetWidth &&"
            "['✓', '✗'].includes(label.dataset.mark) && !label.classList.contains('first')).length"
        )

    low, middle, high = at(0.01), at(0.3), at(0.99)
    assert low > middle >= high == 0
    assert "labels per photo" in text_of(browser)
    assert browser.find(".label.missed"), "given and not found"
    browser.find("#threshold-own")[0].click()
    assert "as predict" in browser.find("#threshold-words")[0].text
    browser.is_sound()


def test_tables_sort_by_number_and_by_name(browser, run_of):
    browser.open(run_of("hundred") / "report.html")
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")

    def column(number):
        return browser.run("return [...document.querySelectorAll('table.classes tbody tr')].map(r =>"
                           " r.cells[arguments[0]].textContent)", number)  # fmt: skip

    button = browser.find("table.classes th button")[0]
    button.click()
    names = column(0)
    assert names == sorted(names, key=browser_order(browser, names))
    button.click()
    assert column(0) == names[::-1]
    browser.find("table.classes th.number button")[1].click()
    values = [float(text) for text in column(2) if text]
    assert values == sorted(values)
    assert len(names) == 100


def browser_order(browser, names):
    ranked = browser.run("return [...arguments[0]].sort((a, b) => a.localeCompare(b))", names)
    return {name: place for place, name in enumerate(ranked)}.__getitem__


def test_right_and_wrong_differ_in_colour_and_in_shape(browser, run_of):
    browser.open(run_of("two") / "report.html")
    looks = browser.run(
        "return ['right', 'wrong'].map(kind => { const made = document.createElement('span');"
        "made.className = 'label ' + kind; document.body.append(made); const style = getComputedStyle(made);"
        "return [style.backgroundColor, style.borderTopStyle, style.borderRadius]; })"
    )
    assert all(left != right for left, right in zip(*looks, strict=True))
    marks = {(figure.get_attribute("class"), figure.find_element("css selector", ".mark").text)
             for figure in browser.find(".photo")}  # fmt: skip
    assert marks <= {("photo good", "✓"), ("photo bad", "✗")}
    assert marks


def test_many_classes_have_pairs_and_few_a_matrix(browser, run_of):
    browser.open(run_of("hundred") / "report.html")
    assert not browser.find("table.matrix")
    counts = browser.run("return [...document.querySelectorAll('#mistakes ~ details table.sort tbody tr')].slice(0, 30)"
                         ".map(r => parseInt(r.cells[2].textContent))")  # fmt: skip
    assert counts
    assert counts == sorted(counts, reverse=True)
    browser.open(run_of("two") / "report.html")
    cells = browser.run("return [...document.querySelectorAll('table.matrix td')].map(c => +c.textContent)")
    assert len(cells) == 4
    assert sum(cells) == 12, "every validation photo"


def test_a_copied_command_is_the_command(browser, run_of):
    browser.open(run_of("two") / "report.html")
    command = browser.find(".command pre")[0].text
    assert command.startswith("finetune-mile predict")
    browser.find(".command button")[0].click()
    browser.wait(lambda: browser.find(".command button")[0].text == "copied")


def test_runs_are_compared_on_one_page(browser, run_of, tmp_path, capsys):
    from finetune_mile.cli import main

    first, second = run_of("two"), run_of("frozen")
    page = tmp_path / "compared.html"
    assert main(["report", str(first), str(first), str(second), "--out", str(page)]) == 0
    browser.is_sound_everywhere(page)
    said = text_of(browser)
    assert "No clear difference between run (2) and run (1): +0.0 points" in said
    assert "not scored on the same photos and classes" in said
    assert main(["report", str(first), str(second), "--out", str(page)]) == 2
    assert main(["report", str(first)]) == 2
    assert main(["report", str(first), str(tmp_path), "--out", str(tmp_path / "x.html")]) == 2
    err = capsys.readouterr().err
    assert "--overwrite" in err
    assert "needs two or more runs" in err
    assert "not the folder of a finished run" in err


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_eight_points_of_one_fixed_part(run_of, kind):
    records = [json.loads(line) for line in (run_of(kind) / "metrics.jsonl").read_text().splitlines()]
    points = [r for r in records if r["kind"] == "curve"] or [r for r in records if r["kind"] == "evaluation"]
    assert len({r["step"] for r in points}) >= 8
    assert len({r.get("images") for r in points}) == 1
    assert points[-1]["step"] == 16


def test_points_take_a_twentieth_of_the_time():
    """Images that are scored are at most as slow as images that are learned from; the trial is a part of the run."""
    from finetune_mile.config.resolve import resolve
    from finetune_mile.training.plan import make_plan

    def curve(labelled, *sets):
        recipe = resolve({"data": "folder:photos", "init": "simclr-demo"}, sets).recipe
        plan = make_plan(recipe, {"labelled": labelled, "unlabelled": 0, "all": labelled})
        return plan, recipe, *plan.curve(recipe)

    for labelled in (100, 3000, 50_000):
        plan, recipe, steps, images = curve(labelled)
        assert len(steps | plan.evaluated(recipe)) >= 8
        trial = 1.8 if 200 <= labelled <= 20_000 else 1.0
        spent = images * len(steps) / (plan.total_steps * recipe.batch_size * trial)
        assert spent < 0.051 or images == 32
    assert curve(3000, "evaluate.phases=true")[2] == set(), "there are enough already"
    assert curve(3000, "evaluate.images=0")[2] == set()
    assert curve(3000, "evaluate.points=0")[2] == set()
    assert len(curve(3000, "evaluate.points=20")[2]) >= 18


def test_the_time_is_told_by_part(run_of):
    info = json.loads((run_of("two") / "run.json").read_text())
    assert {"train", "data", "evaluation", "saving", "report"} <= info["times"].keys()
    assert sum(info["times"].values()) <= info["seconds"] + 0.1


def test_time_inside_of_another_part_counts_once(monkeypatch):
    clock = iter([0.0, 2.0, 5.0, 6.0])
    monkeypatch.setattr("finetune_mile.core.times.time.monotonic", lambda: next(clock))
    times = Times()
    with times.of("train"), times.of("data"):
        pass
    assert times.seconds == {"train": 3.0, "data": 3.0}
    assert bookkeeping({"train": 6.0, "saving": 2.0}, 10.0) == 20.0
    assert [(seconds, share) for _, seconds, share in time_rows({"train": 6.0}, 10.0)] == [(6.0, 60.0), (4.0, 40.0)]
