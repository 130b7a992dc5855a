"""report.html: one self-contained page with the curves, the generations and some images."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, select_autoescape

from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.files import whole_file
from finetune_mile.images.index import say_skipped, say_unreadable
from finetune_mile.measures.names import CLOSING

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from finetune_mile.training.folder import RunFolder
    from finetune_mile.training.session import Session

INK, TEACHER, STUDENT = "#333333", "#d95f02", "#1b7fb5"
GALLERY = 18


def write_report(
    session: Session, shown: Tensor, folder: RunFolder, results: dict[str, float], warning: str | None
) -> None:
    """Write report.html into the run folder.

    Args:
        session: of the run.
        shown: the learner's logits on the `gallery_images`.
        folder: of the run.
        results: of results.json.
        warning: the first line of the page, where there is one.
    """
    unread = [say_skipped(int(results["bad_images"]), Path("bad_images.csv"))] if results.get("bad_images") else []
    unread += [say_unreadable(session.data.unreadable)] if session.data.unreadable else []
    records = folder.metrics()
    plots = {"loss": loss_plot(records), "generations": generation_plot(records), "gate": gate_plot(records)}
    pages = Environment(loader=PackageLoader("finetune_mile.pages"), autoescape=select_autoescape())
    html = pages.get_template("report.html").render(
        title=folder.path.name,
        warning=warning,
        recipe=session.recipe,
        data=session.data.name,
        rows=[(key, f"{results[key]:.2f}", unit, meaning) for key, meaning, unit in CLOSING if key in results],
        plots={name: embed(figure) for name, figure in plots.items() if figure is not None},
        verdicts=[r for r in records if r["kind"] == "gate"],
        gallery=gallery(session, shown),
        has_truth=session.data.val.truth is not None,
        unread=unread,
        settings=to_yaml(session.recipe),
        info=folder.info,
    )
    with whole_file(folder.path / "report.html") as part:
        part.write_text(html, encoding="utf-8")


def plot_figure(columns: int, title: str) -> tuple[Figure, list[Any]]:
    """A figure with some plots over the steps side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * columns, 3.0), layout="constrained")
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("step")
    axes[0].set_title(title, loc="left", fontsize=10)
    return figure, axes


def embed(figure: Figure) -> str:
    """A figure as the source of an HTML image."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def loss_plot(records: list[dict[str, Any]]) -> Figure | None:
    """The training loss, in the colour of who was learning."""
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
    looks = [r for r in records if r["kind"] == "evaluation"]
    labels = [r for r in looks if r.get("labels")]
    shown = [(key, name) for key, name in (("accuracy", "accuracy, %"), ("f1@0.25", "F1 at 0.25, %"))
             if any(key in r for r in looks)]  # fmt: skip
    if len(looks) < 2 or not shown:
        return None
    figure, axes = plot_figure(len(shown) + bool(labels), shown[0][1])
    for axis, (key, name) in zip(axes, shown, strict=False):
        axis.set_title(name, loc="left", fontsize=10)
        for role, colour in (("teacher", TEACHER), ("student", STUDENT)):
            mine = [r for r in looks if r["role"] == role and key in r]
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
    """What `rho: auto` saw before each imitation; a hollow mark is a closed gate."""
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


def gallery_images(session: Session) -> Tensor:
    """Which validation images the report shows: indices (n,)."""
    from finetune_mile.measures.generations import pick_probe

    return pick_probe(len(session.data.val), GALLERY)


def gallery(session: Session, logits: Tensor) -> list[dict[str, object]]:
    """Validation images with the given label, the labels found, and the true ones where known; logits (n, C)."""
    from finetune_mile.images.pipeline import centre_view

    val, classes, picked = session.data.val, session.data.classes, gallery_images(session)
    probabilities = logits.sigmoid() if session.recipe.activation == "sigmoid" else logits.softmax(1)
    shown: list[dict[str, object]] = []
    for row, index in zip(probabilities, picked.tolist(), strict=True):
        if bool(row.isnan().all()):
            continue  # an image that cannot be read
        truth = None if val.truth is None else set(val.truth[index].nonzero().flatten().tolist())
        best = [c for c in row.argsort(descending=True).tolist() if row[c] > 0.25][:6]
        found = [
            {"name": classes[c], "p": f"{row[c]:.2f}", "right": None if truth is None else c in truth} for c in best
        ]
        given = val.given[index]
        names = [classes[int(given)]] if given.ndim == 0 else [classes[c] for c in given.nonzero().flatten().tolist()]
        missed = [] if truth is None else [classes[c] for c in sorted(truth - set(best))]
        picture = _picture(centre_view(val.read(index), session.how))
        shown.append({"picture": picture, "given": ", ".join(names), "found": found, "missed": missed})
    return shown


def _picture(image: Tensor) -> str:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(stream, format="PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
