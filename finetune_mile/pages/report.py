"""Pages for people: report.html of a run, and what other pages are made of."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, select_autoescape
from PIL import Image
from torch import Tensor

from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.files import whole_file
from finetune_mile.images.bad_images import say_skipped, say_unreadable
from finetune_mile.images.pipeline import centre_view
from finetune_mile.images.splits import label_names
from finetune_mile.measures import closing_rows
from finetune_mile.measures.labels import best_and_above, say_threshold
from finetune_mile.measures.predictions import pick_probe

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from finetune_mile.compute.passes import Outputs
    from finetune_mile.images.sets import Data
    from finetune_mile.training.finish import Scored
    from finetune_mile.training.folder import RunFolder
    from finetune_mile.training.task import Task

INK, TEACHER, STUDENT = "#333333", "#d95f02", "#1b7fb5"
GALLERY, MOST_FOUND = 18, 6  # images, and labels of each
CLASS_COLUMNS = {  # of per_class.csv, in the table of classes
    "given": "images", "accuracy": "accuracy, %", "taken_for": "most often taken for", "true": "images with it",
    "average_precision": "average precision, %",
    "precision@0.25": "precision at 0.25, %", "recall@0.25": "recall, %", "f1@0.25": "F1, %",
}  # fmt: skip
MOST_CLASSES = 1000  # in that table
TEMPLATES = Environment(loader=PackageLoader("finetune_mile.pages"), autoescape=select_autoescape())


def render(template: str, **values: object) -> str:
    """A page from finetune_mile/pages/templates."""
    return TEMPLATES.get_template(template).render(values)


def write_page(path: Path, template: str, **values: object) -> None:
    with whole_file(path) as part:
        part.write_text(render(template, **values), encoding="utf-8")


def data_url(png: bytes) -> str:
    """A PNG as the source of an HTML image."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


# --------------------------------------------------------------------------------------------- report.html of a run


def write_report(task: Task, scored: Scored, folder: RunFolder) -> None:
    """Write report.html into the run folder."""
    results = scored.results
    unread = [say_skipped(int(results["bad_images"]), Path("bad_images.csv"))] if results.get("bad_images") else []
    unread += [say_unreadable(task.data.unreadable)] if task.data.unreadable else []
    records = folder.metrics()
    plots = {"loss": loss_plot(records), "generations": generation_plot(records), "gate": gate_plot(records)}
    write_page(
        folder.path / "report.html",
        "report.html",
        title=folder.path.name,
        warning=scored.warning,
        recipe=task.recipe,
        data=task.data.name,
        rows=closing_rows(results, task.recipe.method),
        per_class={name: class_rows(task.data.classes, table) for name, table in scored.tables.items()},
        notes=[*scored.notes, *unread],
        plots={name: data_url(png_of_figure(figure)) for name, figure in plots.items() if figure is not None},
        verdicts=[r for r in records if r["kind"] == "gate"],
        gallery=gallery(task, scored.shown, scored.threshold),
        threshold=say_threshold(scored.threshold),
        has_truth=task.data.val.truth is not None,
        settings=to_yaml(task.recipe),
        info=folder.info,
    )


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


def loss_plot(records: list[dict[str, Any]]) -> Figure | None:
    """The training loss; the colour tells whether the teacher or the student was trained."""
    lines = [r for r in records if r["kind"] == "train"]
    if not lines:
        return None
    figure, (axis,) = plot_figure(1, "training loss")
    figure.set_size_inches(9.2, 2.6)
    for phase, colour, who in (("interaction", TEACHER, "interaction (T)"), ("imitation", STUDENT, "imitation (S)")):
        mine = [r for r in lines if r["phase"] == phase]
        if mine:
            axis.plot([r["step"] for r in mine], [r["loss"] for r in mine], ".", ms=3, color=colour, label=who)
    axis.plot([r["step"] for r in lines], [r["loss"] for r in lines], "-", lw=0.5, color=INK, alpha=0.4)
    axis.legend(frameon=False, fontsize=8)
    return figure


def generation_plot(records: list[dict[str, Any]]) -> Figure | None:
    """Accuracy and F1 of teacher and student at the end of their phases, and the teacher's labels."""
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


def gate_plot(records: list[dict[str, Any]]) -> Figure | None:
    """What `rho: auto` measured before each imitation; a hollow mark is a closed gate."""
    verdicts = [r for r in records if r["kind"] == "gate"]
    if not verdicts:
        return None
    figure, axes = plot_figure(2, "v and g on the held-out images")
    axes[1].set_title("labels found per image", loc="left", fontsize=10)
    steps = [r["step"] for r in verdicts]
    for axis, key, colour in ((axes[0], "v", TEACHER), (axes[0], "g", STUDENT), (axes[1], "labels_found", INK)):
        axis.plot(steps, [r[key] for r in verdicts], "-", lw=1, color=colour)
        for r in verdicts:
            axis.plot(r["step"], r[key], "o", ms=5, color=colour, mfc=colour if r["open"] else "white")
        axis.annotate(key.replace("_", " "), (steps[-1], verdicts[-1][key]), (6, 4), textcoords="offset points")
    return figure


def gallery_images(data: Data) -> Tensor:
    """Which validation images the report shows: indices (n,)."""
    return pick_probe(len(data.val), GALLERY)


def gallery(task: Task, logits: Outputs, threshold: float | Tensor) -> list[dict[str, object]]:
    """Validation images with the given label, the labels found, and the true ones where known.

    Args:
        task: of the run.
        logits: (n, C) on the `gallery_images`.
        threshold: least probability of a label; below it the best one is shown, in parentheses.
    """
    val, classes, picked = task.data.val, task.data.classes, gallery_images(task.data)
    rows = zip(task.probabilities(logits.rows), logits.readable.tolist(), picked.tolist(), strict=True)
    shown: list[dict[str, object]] = []
    for row, readable, index in rows:
        if not readable:
            continue
        truth = None if val.truth is None else set(val.truth[index].nonzero().flatten().tolist())
        above = row > threshold
        best = best_and_above(row, threshold)[:MOST_FOUND]
        predicted = [
            {"text": f"{classes[c]} {row[c]:.2f}" if above[c] else f"({classes[c]} {row[c]:.2f})",
             "right": None if truth is None else c in truth}
            for c in best
        ]  # fmt: skip
        (names,) = label_names(val.given[index : index + 1], classes)
        missed = [] if truth is None else [classes[c] for c in sorted(truth - set(best))]
        picture = data_url(png_of(centre_view(val.read(index), task.preprocess)))
        shown.append(
            {"picture": picture, "given": ", ".join(names) or "no label", "found": predicted, "missed": missed}
        )
    return shown


def gallery_figure(items: list[dict[str, Any]]) -> Figure | None:
    """The images of `gallery` in one figure, each with its given label and the labels found."""
    from matplotlib.figure import Figure

    if not items:
        return None
    columns = 6
    rows = -(-len(items) // columns)
    figure = Figure(figsize=(2 * columns, 2.5 * rows), layout="constrained")
    for place, item in enumerate(items, 1):
        axis = figure.add_subplot(rows, columns, place)
        axis.imshow(np.asarray(Image.open(io.BytesIO(base64.b64decode(item["picture"].partition(",")[2])))))
        axis.axis("off")
        found = ", ".join(label["text"] for label in item["found"][:2])
        axis.set_title(f"given {item['given']}\nfound {found}", fontsize=7, parse_math=False)
    return figure


def png_of(image: Tensor) -> bytes:
    """An image (3, H, W) uint8 as a PNG."""
    stream = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(stream, format="PNG")
    return stream.getvalue()
