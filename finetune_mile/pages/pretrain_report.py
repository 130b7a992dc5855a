"""report.html of a pre-training run: the loss, and what the views look like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, select_autoescape

from finetune_mile.pages.report import INK, embed, plot_figure
from finetune_mile.runlog import RunFolder, whole_file
from finetune_mile.settings import to_yaml

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from finetune_mile.pretraining.session import Session

SHOWN = 12  # images whose views are shown


def write_report(session: Session, folder: RunFolder, results: dict[str, Any]) -> None:
    """Write report.html and views.png into the run folder."""
    lines = [r for r in folder.metrics() if r["kind"] == "train"]
    plot, (axis,) = plot_figure(1, "training loss")
    plot.set_size_inches(9.2, 2.6)
    axis.plot([r["step"] for r in lines], [r["loss"] for r in lines], "-", lw=1, color=INK)
    pictures = views_figure(session)
    with whole_file(folder.path / "views.png") as part:
        pictures.savefig(part, format="png", dpi=100)
    pages = Environment(loader=PackageLoader("finetune_mile.pages"), autoescape=select_autoescape())
    html = pages.get_template("pretrain.html").render(
        title=folder.path.name,
        recipe=session.recipe,
        results={key: value for key, value in results.items() if value is not None},
        loss=embed(plot),
        views=embed(pictures),
        settings=to_yaml(session.recipe),
    )
    with whole_file(folder.path / "report.html") as part:
        part.write_text(html, encoding="utf-8")


def views_figure(session: Session) -> Figure:
    """Some images in the first row, and each of their views in a row below."""
    from matplotlib.figure import Figure

    count = min(SHOWN, len(session.images))
    keys = [(0, i) for i in range(count)]
    images = session.plain().look(keys)[0].images
    rows: list[Tensor] = [images.float() / 255, *(view.cpu() for view in session.views(images, keys))]
    figure = Figure(figsize=(count * 0.75, len(rows) * 0.75))
    for at, row in enumerate(rows):
        for column, image in enumerate(row):
            axis = figure.add_axes((column / count, 1 - (at + 1) / len(rows), 0.96 / count, 0.96 / len(rows)))
            axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set_axis_off()
    return figure
