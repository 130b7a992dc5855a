"""The charts of a report, and the figures of trackers, rendered; other tests only build these."""

import numpy as np
import pytest

from finetune_mile.learning.phases import Phase
from finetune_mile.pages.curves import MOST_POINTS, charts_of, imitations, joined, thinned
from finetune_mile.pages.report import data_url, gallery_figure, generation_plot, pixels, png_of_figure

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
SHOWN = [(np.full((8, 8, 3), 200, dtype=np.uint8), "given cat_$1\nfound dog 0.61")] * 7
RESULTS = {"images": 40.0, "accuracy": 48.0, "probe_accuracy": 30.0}


def test_charts_have_every_record_and_what_must_be_beaten():
    score, loss, gate = charts_of(RECORDS, RESULTS, [])
    steps, *lines = score["data"]
    assert steps == [4, 6, 10]
    assert lines == [[20.0, None, 50.0], [None, 30.0, None], [None, None, 48.0], [30.0, None, 30.0]]
    names = [one["label"] for one in score["series"]]
    assert names == ["after given labels", "after the teacher's labels", "final weights, all 40", "linear probe"]
    assert loss["data"] == [[4, 6, 10], [0.25, None, 0.1], [None, None, None]], "a loss that is no number is a gap"
    assert gate["data"][1:] == [[12.5] * 3, [0.4] * 3]
    assert charts_of([], {"images": 0.0}, []) == []


def test_points_of_a_fixed_part_are_the_curve_and_complete_evaluations_are_beside_it():
    points = [{"kind": "curve", "step": step, "role": "student", "images": 9.0, "accuracy": 10.0} for step in (2, 10)]
    one = [{**record, "images": 40.0} for record in RECORDS if record["step"] == 10]
    score, *_ = charts_of([*points, *one], RESULTS, [])
    assert [each["label"] for each in score["series"]][:2] == ["accuracy", "on 40 photos"]
    assert score["data"][:3] == [[2, 10], [10.0, 10.0], [None, 50.0]]


def test_phases_lines_and_long_lines():
    steps = (("interaction", 3), ("imitation", 2), ("interaction", 1), ("imitation", 4))
    phases = [
        Phase(name=name, generation=0, steps=count, start="learner", becomes=(), loss="bce") for name, count in steps
    ]
    assert imitations(phases) == [(3, 5), (6, 10)]
    assert joined([([1, 3], [5, 6]), ([2], [7])]) == [[1, 2, 3], [5, None, 6], [None, 7, None]]
    steps, values = thinned(range(10_000), range(10_000))
    assert len(steps) == len(values) == MOST_POINTS
    assert steps[-1] == 9999
    assert values[0] == np.mean(range(10_000 // MOST_POINTS))


@pytest.mark.parametrize("plot", [generation_plot])
def test_a_plot_shows_its_records(rendered, plot):
    picture, other = pixels(plot(RECORDS)), pixels(plot([{**record, "step": 4} for record in RECORDS]))
    assert picture.shape == other.shape
    assert picture.min() < 100 < 250 < picture.max()
    assert (picture != other).any()


def test_without_records_there_is_no_plot():
    assert generation_plot([]) is None


def test_the_gallery_of_a_tracker(rendered):
    figure = gallery_figure(SHOWN)
    picture = pixels(figure)
    assert data_url(png_of_figure(figure)).startswith("data:image/png;base64,iVBOR")
    assert np.abs(picture.astype(int) - 200).max(2).min() == 0, "the photo is there"
    assert len(figure.axes) == 7
    assert gallery_figure([]) is None
