"""report.html of a pre-training run: the loss, and what the views look like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, select_autoescape

from finetune_mile.config.resolve import to_yaml
from finetune_mile.core.files import whole_file
from finetune_mile.pages.report import INK, embed, plot_figure

if TYPE_CHECKING:
    from PIL.Image import Image

    from finetune_mile.pretraining.session import Session
    from finetune_mile.training.folder import RunFolder

SHOWN, CELL = 12, 84  # images whose views are shown, and about how large


def write_report(session: Session, folder: RunFolder, results: dict[str, Any]) -> None:
    """Write report.html and views.png into the run folder."""
    lines = [r for r in folder.metrics() if r["kind"] == "train"]
    plot, (axis,) = plot_figure(1, "training loss")
    plot.set_size_inches(9.2, 2.6)
    axis.plot([r["step"] for r in lines], [r["loss"] for r in lines], "-", lw=1, color=INK)
    views = views_picture(session)
    with whole_file(folder.path / "views.png") as part:
        views.save(part, format="PNG")
    pages = Environment(loader=PackageLoader("finetune_mile.pages"), autoescape=select_autoescape())
    html = pages.get_template("pretrain.html").render(
        title=folder.path.name,
        recipe=session.recipe,
        results={key: value for key, value in results.items() if value is not None},
        loss=embed(plot),
        settings=to_yaml(session.recipe),
    )
    with whole_file(folder.path / "report.html") as part:
        part.write_text(html, encoding="utf-8")


def views_picture(session: Session) -> Image:
    """Some images in the first row, and each of their views in a row below."""
    import torch
    from PIL import Image

    count = min(SHOWN, len(session.images))
    keys = [(0, i) for i in range(count)]
    images = session.plain().read(keys)[0].images
    rows = [images.float() / 255, *(view.cpu() for view in session.views(images, keys))]
    square = (max(CELL // (session.recipe.size or 1), 1) * (session.recipe.size or 1),) * 2
    rows = [torch.nn.functional.interpolate(row, square) for row in rows]  # nearest: pixels stay pixels
    framed = [torch.nn.functional.pad(row, (2, 2, 2, 2), value=1.0) for row in rows]
    sheet = torch.cat([torch.cat(list(row), 2) for row in framed], 1)
    return Image.fromarray((sheet * 255).round().byte().permute(1, 2, 0).contiguous().numpy())
