"""Pages for people: report.html of a run, and what other pages are made of."""

from __future__ import annotations

import base64
import io
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.files import write_whole
from finetune_mile.core.times import bookkeeping, duration, time_rows
from finetune_mile.images.bad_images import say_skipped, say_unreadable
from finetune_mile.images.pipeline import centre_view
from finetune_mile.images.splits import label_names
from finetune_mile.measures import closing_rows
from finetune_mile.measures.labels import best_and_above, say_threshold
from finetune_mile.measures.metrics import Measured
from finetune_mile.measures.predictions import pick_probe
from finetune_mile.measures.verdicts import verdict
from finetune_mile.pages.curves import charts_of, imitations
from finetune_mile.pages.findings import (
    MOST_CLASSES,
    calibration,
    changed_settings,
    confusions,
    guesses,
    score_rows,
    threshold_curves,
)
from finetune_mile.pages.photos import chosen, photos, surest

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from finetune_mile.compute.passes import Outputs
    from finetune_mile.training.finish import Scored
    from finetune_mile.training.folder import RunFolder
    from finetune_mile.training.task import Task

INK, TEACHER, STUDENT = "#333333", "#d95f02", "#1b7fb5"
GALLERY, MOST_FOUND = 18, 2  # of the gallery of trackers: images, and labels of each
CLASS_COLUMNS = {  # of per_class.csv, in the table of classes
    "given": "images", "accuracy": "accuracy, %", "taken_for": "most often taken for", "true": "images with it",
    "average_precision": "average precision, %",
    "precision@0.25": "precision at 0.25, %", "recall@0.25": "recall, %", "f1@0.25": "F1, %",
}  # fmt: skip
MOST_GATES = 12  # decisions of `auto` that are told
KINDS = (  # of photos: which, title, sentence
    ("worst", "The worst", "The model is sure of what is not given: wrong labels, or classes that are alike."),
    ("doubtful", "The most doubtful", "The model can hardly decide. More photos like these, with labels, help most."),
    ("best", "The best", "What the model is right about and surest of."),
)  # fmt: skip
GUESSES = (  # of photos without a label: which, title, sentence
    ("sure", "The surest", "Photos like these taught the model in the second stage, with their first label."),
    ("refused", "The least sure", "No label reached the confidence, so photos like these taught nothing."),
)
LOADER = PackageLoader("finetune_mile.pages")
TEMPLATES = Environment(loader=LOADER, autoescape=select_autoescape())


def raw(name: str) -> Markup:
    """The text of a file beside the templates, as it is: a style, or a script of ours or of uPlot's."""
    return Markup(LOADER.get_source(TEMPLATES, name)[0])


TEMPLATES.globals["raw"] = raw


def render(template: str, **values: object) -> str:
    """A page from finetune_mile/pages/templates."""
    return TEMPLATES.get_template(template).render(values)


def write_page(path: Path, template: str, **values: object) -> None:
    write_whole(path, render(template, **values).encode("utf-8", "backslashreplace"))  # names of files


def data_url(png: bytes) -> str:
    """A PNG as the source of an HTML image."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


# --------------------------------------------------------------------------------------------- report.html of a run


def write_report(task: Task, scored: Scored, folder: RunFolder) -> None:
    """Write report.html into the run folder."""
    write_page(folder.path / "report.html", "report.html", **report_values(task, scored, folder))


def report_values(task: Task, scored: Scored, folder: RunFolder) -> dict[str, Any]:
    """What templates/report.html shows."""
    results, recipe, data, measured = scored.results, task.recipe, task.data, scored.measured
    unread = [say_skipped(int(results["bad_images"]), Path("bad_images.csv"))] if results.get("bad_images") else []
    unread += [say_unreadable(data.unreadable)] if data.unreadable else []
    records, seconds = folder.metrics(), float(folder.info.get("seconds", 0.0))
    several = recipe.activation == "sigmoid" or data.val.given.ndim == 2
    readable = scored.outputs.readable.nonzero().flatten()
    times, threshold = folder.info.get("times", {}), scored.threshold
    own = float(threshold.mean()) if isinstance(threshold, Tensor) else threshold
    values = {
        **about_run(task, folder),
        "verdict": verdict(results, scored.warning, frozen=recipe.trunk == "frozen"),
        "scores": score_rows(results),
        "notes": [note for note in [*scored.notes, *unread] if "_" not in note],
        "keys": [note for note in [*scored.notes, *unread] if "_" in note],  # about keys of results.json
        "rows": closing_rows(results, recipe.method),
        "charts": charts_of(records, results, task.plan.phases),
        "bands": imitations(task.plan.phases),
        "gate": [say_gate(r) for r in records if r["kind"] == "gate"][-MOST_GATES:],
        "confusion": confusions(measured, data.classes),
        "several": several,
        "extra": several and data.val.given.ndim == 1 and data.val.truth is None,
        "photos": photos(data.val, readable, chosen(measured), measured, data.classes, threshold),
        "kinds": KINDS,
        "guesses": about_guesses(task, scored),
        "thresholds": threshold_curves(measured) if several else {},
        "own_threshold": f"{own:.2f}",
        "own_words": f"as predict: labels above {say_threshold(threshold)}, and always the best one",
        "per_class": {name: class_rows(data.classes, table) for name, table in scored.tables.items()},
        "calibration": say_calibration(calibration(measured)),
        "times": [(*row, duration(row[1])) for row in time_rows(times, seconds)],
        "bookkeeping": bookkeeping(times, seconds),
        "duration": duration(seconds),
        "changed": changed_settings(task.requested),
        "commands": commands(task, folder.path),
    }
    return values | {"sections": sections(values)}


def about_run(task: Task, folder: RunFolder) -> dict[str, Any]:
    """What was trained, on what."""
    recipe, data = task.recipe, task.data
    return {
        "title": folder.path.name,
        "method": METHOD_NAMES.get(recipe.method, recipe.method),
        "init": recipe.init,
        "data": data.name,
        "labels": len(task.pools.indices["labelled"]),
        "classes": data.classes,
        "images": len(data.val),
        "steps": recipe.steps,
        "size": task.preprocess.size,
        "seed": recipe.seed,
        "speed": folder.info.get("images_per_second"),
        "settings": to_yaml(recipe),
    }


def about_guesses(task: Task, scored: Scored) -> dict[str, Any]:
    """What the model says of the images without a label that a second stage saw; empty where there was none."""
    if scored.guessed is None:
        return {}
    picked, outputs, confidence = scored.guessed
    labelled = task.pools.images.given[torch.from_numpy(task.pools.indices["labelled"])]
    indices, classes = torch.from_numpy(picked)[outputs.readable], task.data.classes
    unknown = torch.full((len(indices),), -1)
    guessed = Measured(
        logits=outputs.rows[outputs.readable], activation=task.recipe.activation, given=unknown, truth=None
    )
    return {
        **guesses(labelled, guessed, scored.measured, classes, confidence),
        "all": len(task.pools.indices["unlabelled"]),
        "kinds": GUESSES,
        "photos": photos(task.pools.images, indices, surest(guessed, confidence), guessed, classes, confidence),
    }


SECTIONS = (  # id, what it needs, name
    ("scores", "scores", "Score"), ("curves", "charts", "Curves"), ("mistakes", "confusion", "Mistakes"),
    ("photos", "photos", "Photos"), ("unlabelled", "guesses", "Without a label"), ("classes", "per_class", "Classes"),
    ("calibration", "calibration", "Calibration"), ("time", "times", "Time"), ("settings", "settings", "Settings"),
    ("commands", "commands", "Go on"),
)  # fmt: skip
METHOD_NAMES = {"mile": "MILe", "auto": "MILe with its own threshold (auto)", "wan": "weak negatives (wan)"}


def sections(values: dict[str, Any]) -> list[tuple[str, str]]:
    """The parts of the page that there are: id and name."""
    return [(place, name) for place, key, name in SECTIONS if values[key]]


def say_gate(record: dict[str, Any]) -> str:
    """A decision of `auto` before an imitation, with what it was decided by."""
    v, g = record["v"], record["g"]
    return (
        f"Step {record['step']:,}: {'labels were added' if record['open'] else 'no labels were added'}. "
        f"v {v:.2f} ± {v * record['v_error']:.2f}, g {g:.2f} ± {record['g_error']:.2f}, "
        f"{record['labels_found']:.1f} labels found per photo (docs/auto.md)."
    )


def say_calibration(found: dict[str, Any]) -> dict[str, Any]:
    """With a sentence about it."""
    if not found:
        return {}
    what, over, gap = "labels" if found["sets"] else "photos", found["over"], found["gap"]
    lean = (
        "It is too sure of itself"
        if over > 2
        else "It is less sure than it could be"
        if over < -2
        else "On average it is neither too sure nor too doubtful"
    )
    return found | {
        "words": f"{lean}: what it says and the share of {what} that is right differ by {gap:.0f} points in the mean."
    }


def commands(task: Task, path: Path) -> list[tuple[str, str]]:
    """What to do with a run: a sentence and a command each."""
    run, recipe, command = str(path), task.recipe, "finetune-mile"
    probe = ["probe", "--init", recipe.init, "--data", recipe.data, "--fraction", f"{recipe.fraction:g}"]
    listed = [
        ("Label new photos", ["predict", run, "IMAGES"]),
        ("Score it on other photos, with intervals", ["eval", "--model", f"run:{run}", "--data", "folder:OTHER"]),
        ("Compare it with another run on one page", ["report", run, "OTHER-RUN"]),
        ("Train on the validation photos too, when all is chosen", ["run", "--resume", run, "--refit"]),
        ("Write it for ONNX (or timm, hf, torch)", ["export", run, "--to", "onnx", "--out", f"{path.name}-onnx"]),
    ]
    listed += [("What the checkpoint alone can do", probe)] if recipe.init != "none" else []
    return [(text, shlex.join([command, *words])) for text, words in listed]


def class_rows(classes: tuple[str, ...], table: dict[str, Tensor]) -> list[dict[str, str]]:
    """Lines of a table of classes, the lowest score first: title of a column to text; columns of `table` are (C,)."""
    columns = {key: table[key].tolist() for key in CLASS_COLUMNS if key in table}
    score = next(columns[key] for key in ("accuracy", "average_precision") if key in columns)
    order = sorted(range(len(classes)), key=lambda i: (score[i] != score[i], score[i]))[:MOST_CLASSES]

    def text(key: str, value: float) -> str:
        if key == "taken_for":
            return classes[int(value)] if value >= 0 else ""
        return "" if value != value else f"{value:.1f}" if isinstance(value, float) else f"{value:,}"

    return [
        {"class": classes[i]} | {CLASS_COLUMNS[key]: text(key, values[i]) for key, values in columns.items()}
        for i in order
    ]


def plot_figure(columns: int, title: str) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * columns, 3.0), layout="constrained")
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("step")
    axes[0].set_title(title, loc="left", fontsize=10)
    return figure, axes


def pixels(figure: Figure) -> NDArray[np.uint8]:
    """A figure as an image (H, W, 3), for trackers."""
    return np.asarray(Image.open(io.BytesIO(png_of_figure(figure))).convert("RGB"))


def png_of_figure(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def generation_plot(records: list[dict[str, Any]]) -> Figure | None:
    """For trackers: accuracy and F1 of teacher and student at the end of their phases, and the teacher's labels."""
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    labels = [r for r in evaluations if r.get("labels")]
    names = {"accuracy": "accuracy, %", "map": "mean average precision, %", "f1@0.25": "F1 at 0.25, %"}
    shown = [(key, name) for key, name in names.items() if any(key in r for r in evaluations)]
    if len(evaluations) < 2 or not shown:
        return None
    figure, axes = plot_figure(len(shown) + bool(labels), shown[0][1])
    for axis, (key, name) in zip(axes, shown, strict=False):
        axis.set_title(name, loc="left", fontsize=10)
        for role, colour in (("teacher", TEACHER), ("student", STUDENT)):
            mine = [r for r in evaluations if r["role"] == role and key in r]
            axis.plot([r["step"] for r in mine], [r[key] for r in mine], "o-", ms=3, color=colour, label=role)
        axis.legend(frameon=False, fontsize=8)
    if labels:
        axes[-1].set_title("the teacher's labels", loc="left", fontsize=10)
        steps = [r["step"] for r in labels]
        for key, name in (("labels_per_image", "labels per image"), ("given_recall", "given label kept"),
                          ("empty_share", "empty sets")):  # fmt: skip
            axes[-1].plot(steps, [r["labels"][key] for r in labels], "o-", ms=3, label=name)
        axes[-1].legend(frameon=False, fontsize=8)
    return figure


def gallery(task: Task, outputs: Outputs, threshold: float | Tensor) -> list[tuple[NDArray[np.uint8], str]]:
    """For trackers: some validation images (H, W, 3), with a title of given and found labels.

    Args:
        task: of the run.
        outputs: logits (n, C) of all validation images.
        threshold: least probability of a label; below it the best one is shown, in parentheses.
    """
    val, classes = task.data.val, task.data.classes
    shown = []
    for index in pick_probe(len(val), GALLERY).tolist():
        if not outputs.readable[index]:
            continue
        (row,) = task.probabilities(outputs.rows[index : index + 1])
        found = [
            f"{classes[c]} {row[c]:.2f}" if above else f"({classes[c]} {row[c]:.2f})"
            for c, above in ((c, bool((row > threshold)[c])) for c in best_and_above(row, threshold)[:MOST_FOUND])
        ]
        (names,) = label_names(val.given[index : index + 1], classes)
        picture = centre_view(val.read(index), task.preprocess).permute(1, 2, 0).numpy()
        shown.append((picture, f"given {', '.join(names) or 'no label'}\nfound {', '.join(found)}"))
    return shown


def gallery_figure(items: list[tuple[NDArray[np.uint8], str]]) -> Figure | None:
    """The images of `gallery` in one figure, each with its title."""
    from matplotlib.figure import Figure

    if not items:
        return None
    columns = 6
    rows = -(-len(items) // columns)
    figure = Figure(figsize=(2 * columns, 2.5 * rows), layout="constrained")
    for place, (picture, title) in enumerate(items, 1):
        axis = figure.add_subplot(rows, columns, place)
        axis.imshow(picture)
        axis.axis("off")
        axis.set_title(title, fontsize=7, parse_math=False)
    return figure


def png_of(image: Tensor) -> bytes:
    """An image (3, H, W) uint8 as a PNG."""
    stream = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(stream, format="PNG")
    return stream.getvalue()
