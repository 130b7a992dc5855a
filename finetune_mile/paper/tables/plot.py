"""plot.png: every measure of every cell with its spread over seeds, the paper's numbers beside; sweeps as heat maps."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

from finetune_mile.paper.tables.ledger import BlockLedger, Ledger
from finetune_mile.paper.tables.runs import layered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

COLOURS = ("#1b7fb5", "#d95f02", "#3a9a4f", "#8a5fb0", "#b8860b", "#555555")
INK, PALE = "#333333", "#e4e4e4"
COUNT_OF_COLOURS = 128  # of the file
PER_LINE = 4  # panels side by side


def draw(ledger: Ledger, description: str) -> bytes | None:
    """The picture as PNG that carries `description`; None where nothing was run and the paper says nothing."""
    from matplotlib.figure import Figure
    from PIL import Image, PngImagePlugin

    blocks = [
        b for b in ledger.blocks if any(n.ours.n or n.paper is not None for c in b.cells for n in c.numbers.values())
    ]
    if not blocks:
        return None
    heights = [_height(b) for b in blocks]
    figure = Figure(figsize=(13, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, block in zip(parts, blocks, strict=True):
        part.suptitle(block.block.name, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
        if block.block.heatmap is not None:
            _heatmap(part, ledger, block)
        elif block.block.curve is not None:
            _curve(part, block)
        else:
            _panels(part, block)
    stream, small = io.BytesIO(), io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    facts = PngImagePlugin.PngInfo()
    facts.add_text("Description", description)
    with Image.open(stream) as picture:  # a plot has few colours: with a palette it takes a third of the bytes
        few = picture.convert("RGB").quantize(COUNT_OF_COLOURS, dither=Image.Dither.NONE)
    few.save(small, format="png", optimize=True, pnginfo=facts)
    return small.getvalue()


def _lines(block: BlockLedger) -> int:
    return -(-len(block.block.measures) // PER_LINE)


def _height(block: BlockLedger) -> float:
    if block.block.heatmap is not None:
        return 3.6
    if block.block.curve is not None:
        return 4.2
    offsets = max(len(block.block.shown_columns), 2)
    return 1.1 + _lines(block) * (0.9 + len(block.block.shown_rows) * (0.16 + 0.08 * offsets))


def _panels(figure: SubFigure, block: BlockLedger) -> None:
    """One panel per measure: rows from top to bottom, columns of the table in colours."""
    measures = list(block.block.measures)
    across = min(len(measures), PER_LINE)
    axes = figure.subplots(_lines(block), across, sharey=True, squeeze=False)
    for number, axis in enumerate(axes.flat):
        if number < len(measures):
            _panel(axis, block, measures[number])
        else:
            axis.axis("off")
    handles = [
        axes.flat[0].plot([], [], "o", color=colour, label=column or "ours")[0]
        for column, colour in zip(block.block.shown_columns, itertools.cycle(COLOURS), strict=False)
    ]
    if block.block.paper:
        handles += axes.flat[0].plot([], [], "D", mfc="none", mec=INK, label="paper")
    if len(handles) > 1:
        figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=9)


def _panel(axis: Axes, block: BlockLedger, measure: str) -> None:
    rows, columns = block.block.shown_rows, list(block.block.shown_columns)
    step = 0.7 / len(columns)
    for cell in block.cells:
        number, at = cell.numbers[measure], columns.index(cell.column)
        y = rows.index(cell.row) + (at - (len(columns) - 1) / 2) * step
        colour = COLOURS[at % len(COLOURS)]
        if number.ours.n:
            axis.errorbar(number.ours.mean, y, xerr=number.ours.sd, fmt="o", ms=4.5, color=colour, lw=1.3, capsize=0)
            axis.plot(number.ours.values, [y] * number.ours.n, "|", ms=5, color=colour, alpha=0.5, zorder=1)
        if number.paper is not None:
            axis.plot(number.paper, y, "D", ms=5, mfc="none", mec=colour)
    axis.set_title(measure, loc="left", fontsize=10, color=INK)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0, labelsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", color=PALE, lw=0.8)
    axis.set_axisbelow(True)
    for y in range(1, len(rows)):
        axis.axhline(y - 0.5, color=PALE, lw=0.6)


def _heatmap(figure: SubFigure, ledger: Ledger, block: BlockLedger) -> None:
    """Two settings against each other; one map per measure, its mean as colour and in figures."""
    heatmap, own = block.block.heatmap, block.block
    assert heatmap is not None
    axes = figure.subplots(1, len(heatmap.measures), squeeze=False)[0]
    x_key, y_key = (next(iter(layered({name: None}))) for name in (heatmap.x, heatmap.y))
    for axis, measure in zip(axes, heatmap.measures, strict=True):
        means: dict[tuple[Any, Any], float] = {}
        for cell in block.cells:
            if cell.column in own.columns and cell.numbers[measure].ours.n:
                rows, columns = own.rows[cell.row].settings, own.columns[cell.column]
                settings = layered(ledger.table.settings, own.settings, columns, rows)
                means[settings.get(x_key), settings.get(y_key)] = cell.numbers[measure].ours.mean
        if means:
            _map(axis, means)
        axis.set_xlabel(heatmap.x)
        axis.set_ylabel(heatmap.y)
        axis.set_title(measure, loc="left", fontsize=10, color=INK)


def _map(axis: Axes, means: dict[tuple[Any, Any], float]) -> None:
    from matplotlib.colors import Normalize

    xs, ys = (_ordered({place[i] for place in means}) for i in (0, 1))
    grid = [[means.get((x, y), float("nan")) for x in xs] for y in ys]
    low, high = min(means.values()), max(means.values())
    axis.imshow(grid, cmap="viridis", norm=Normalize(low, high), aspect="auto", origin="lower")
    for (x, y), value in means.items():
        pale = value > low + 0.6 * (high - low)
        axis.text(xs.index(x), ys.index(y), f"{value:.1f}", ha="center", va="center", fontsize=9,
                  color=INK if pale else "white")  # fmt: skip
    axis.set_xticks(range(len(xs)), [str(x) for x in xs])
    axis.set_yticks(range(len(ys)), [str(y) for y in ys])


def _curve(figure: SubFigure, block: BlockLedger) -> None:
    """One panel per column: the rows joined in their order, rivals as points beside, each with its spread."""
    curve = block.block.curve
    assert curve is not None
    columns = list(block.block.columns)
    joined = curve.rows or tuple(r for r in block.block.shown_rows if r not in curve.rivals)
    axes = figure.subplots(1, max(len(columns), 2), squeeze=False)[0]
    for axis in axes[len(columns) :]:
        axis.axis("off")
    for axis, column in zip(axes[: len(columns)], columns, strict=True):
        rivals_y = curve.rivals_y or curve.y
        for rows, measure, colour in ((joined, curve.y, COLOURS[0]), (curve.rivals, rivals_y, COLOURS[1])):
            cells = [c for r in rows if (c := block.cell(r, column)) is not None and c.numbers[measure].ours.n]
            points = [(c.row, c.numbers[curve.x].ours, c.numbers[measure].ours) for c in cells]
            if rows is joined:
                axis.plot([x.mean for _, x, _ in points], [y.mean for _, _, y in points], color=PALE, lw=2, zorder=1)
            for name, x, y in points:
                label = name if measure == curve.y else f"{name} ({measure})"
                axis.errorbar(x.mean, y.mean, xerr=x.sd, yerr=y.sd, fmt="o", ms=4.5, color=colour, lw=1, capsize=0)
                axis.annotate(label, (x.mean, y.mean), xytext=(5, 4), textcoords="offset points", fontsize=8, color=INK)
        axis.margins(0.12)
        axis.set_xlabel(curve.x)
        axis.set_ylabel(curve.y)
        axis.set_title(column, loc="left", fontsize=10, color=INK)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color=PALE, lw=0.8)
        axis.set_axisbelow(True)


def _ordered(values: set[Any]) -> list[Any]:
    """Numbers by size, then words."""
    return sorted(values, key=lambda v: (0, v, "") if isinstance(v, int | float) else (1, 0, str(v)))
