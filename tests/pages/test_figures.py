"""The figures of a report and of trackers, rendered; other tests only build them."""

import numpy as np
import pytest
import torch

from finetune_mile.pages.report import (
    data_url,
    gallery_figure,
    gate_plot,
    generation_plot,
    loss_plot,
    pixels,
    png_of,
    png_of_figure,
)

LABELS = {"labels_per_image": 1.2, "given_recall": 0.9, "empty_share": 0.1}
PHASES = [(4, "interaction", "teacher"), (6, "imitation", "student"), (10, "interaction", "teacher")]
RECORDS = [
    record
    for step, phase, role in PHASES
    for record in (
        {"kind": "train", "step": step, "phase": phase, "loss": 1 / step if step != 6 else float("nan")},
        {"kind": "gate", "step": step, "v": 12.5, "g": 0.4, "labels_found": 1.7, "open": role == "teacher"},
        {"kind": "evaluation", "step": step, "role": role, "accuracy": 5.0 * step, "f1@0.25": 40.0, "map": 30.0}
        | ({"labels": LABELS} if role == "teacher" else {}),
    )
]
PICTURE = data_url(png_of(torch.full((3, 8, 8), 200, dtype=torch.uint8)))
SHOWN = [{"picture": PICTURE, "given": "cat_$1", "found": [{"text": "dog 0.61", "right": None}], "missed": []}] * 7


@pytest.mark.parametrize("plot", [loss_plot, generation_plot, gate_plot])
def test_a_plot_shows_its_records(rendered, plot):
    picture, other = pixels(plot(RECORDS)), pixels(plot([{**record, "step": 4} for record in RECORDS]))
    assert picture.shape == other.shape
    assert picture.min() < 100 < 250 < picture.max()
    assert (picture != other).any()


@pytest.mark.parametrize("plot", [loss_plot, generation_plot, gate_plot])
def test_without_records_there_is_no_plot(plot):
    assert plot([]) is None


def test_the_gallery_of_a_tracker(rendered):
    figure = gallery_figure(SHOWN)
    picture = pixels(figure)
    assert data_url(png_of_figure(figure)).startswith("data:image/png;base64,iVBOR")
    assert np.abs(picture.astype(int) - 200).max(2).min() == 0, "the photo is there"
    assert len(figure.axes) == 7
    assert gallery_figure([]) is None
