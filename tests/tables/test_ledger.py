"""The ledger as a pure function: means, spreads, verdicts, pairs, bars, and their texts."""

import csv
import io
import math

import pytest
from shortcuts import refused
from tiny import TINY

from finetune_mile.core.problems import Problem
from finetune_mile.paper.tables import writing
from finetune_mile.paper.tables.description import Table
from finetune_mile.paper.tables.ledger import Number, Spread, make_ledger, noise
from finetune_mile.paper.tables.runs import RunRecord, read_records, write_records


def record(row, seed, column="10 %", status="done", **results):
    found = {"accuracy": 50.0, "f1@0.25": 20.0, "trivial_f1": 75.0} | results
    return RunRecord(
        block="fine-tuning", row=row, column=column, seed=seed, status=status, recipe="12345678",
        results=found if status == "done" else {}, seconds=12.0, device="cpu", threads=1, commit="a" * 40,
    )  # fmt: skip


def tiny(**changes):
    return Table.model_validate({**TINY, "seeds": [0, 1, 2], **changes})


def runs():
    """Student above sigmoid in two of three seeds, by 1 on average."""
    values = {"sigmoid": (48.0, 50.0, 52.0), "student": (51.0, 49.0, 54.0)}
    return [record(row, seed, accuracy=v) for row, vs in values.items() for seed, v in enumerate(vs)]


def test_noise_is_the_prediction_interval_of_one_more_run():
    ours = Spread(values=(48.0, 50.0, 52.0))
    assert ours.sd == 2.0
    assert noise(ours) == pytest.approx(4.302653 * 2 * math.sqrt(4 / 3))
    many = Spread(values=tuple(float(i % 2) for i in range(31)))
    assert noise(many) == pytest.approx(2.042272 * many.sd * math.sqrt(1 + 1 / 31))


@pytest.mark.parametrize(
    ("values", "paper", "verdict"),
    [
        ((48.0, 50.0, 52.0), 55.0, "within noise"),
        ((48.0, 50.0, 52.0), 61.0, "lower"),
        ((48.0, 50.0, 52.0), 39.0, "higher"),
        ((48.0,), 39.0, "one seed"),
        ((), 39.0, "not run"),
        ((48.0, 49.0), None, ""),
    ],
)
def test_verdicts(values, paper, verdict):
    assert Number(ours=Spread(values=values), paper=paper).verdict == verdict


def test_differences_are_paired_by_seed_and_bars_are_checked():
    kept = [r for r in runs() if (r.row, r.seed) != ("student", 1)]
    whole, part = (make_ledger(tiny(), records, {}).blocks[0] for records in (runs(), kept))
    top1, f1 = whole.differences
    assert (top1.measure, top1.paired.values, top1.up) == ("top-1", (3.0, -1.0, 2.0), 2)
    assert f1.paired.values == (0.0, 0.0, 0.0)
    assert part.differences[0].paired.values == (3.0, 2.0)
    assert [bar.outcome for bar in whole.bars] == ["met", "NOT met", "not run"]
    assert [bar.outcome for bar in part.bars] == ["seeds missing", "NOT met", "not run"], "not met by two of three"
    assert whole.constants["trivial F1"]["10 %"].values == (75.0,)


def test_a_stale_or_stopped_run_does_not_count_and_is_told():
    records = [record("sigmoid", 0), record("sigmoid", 1, status="stale"), record("sigmoid", 2, status="stopped")]
    ledger = make_ledger(tiny(), records, {"fine-tuning / after / 100 %": "about 3.1 h per run"})
    cell = ledger.blocks[0].cell("sigmoid", "10 %")
    assert (len(cell.runs), len(cell.others)) == (1, 2)
    text = writing.markdown(ledger)
    assert "sigmoid, 10 %, seed 1: stale; not counted" in text
    assert "1 of 3" in text
    assert "not run, about 3.1 h per run" in text
    assert "| after | 100 % | top-1 | 60 |  |  |  | not run | about 3.1 h per run |" in text


def test_a_measure_that_no_run_has_is_a_mistake():
    def wrong(tree):
        block = {**TINY["blocks"][0], "measures": {"top-1": "acuracy", "F1": "f1@0.25"}}
        return {**tree, "blocks": [block]}

    with refused("measures top-1", "'acuracy'", "accuracy, f1@0.25, trivial_f1"):
        make_ledger(Table.model_validate(wrong(TINY)), [record("sigmoid", 0)], {})


def test_csv_has_every_number_with_its_values():
    lines = list(csv.DictReader(io.StringIO(writing.csv_text(make_ledger(tiny(), runs(), {})))))
    assert len(lines) == 4 * 2
    first = lines[0]
    assert (first["row"], first["measure"], first["paper"], first["ours"], first["sd"]) == (
        "sigmoid",
        "top-1",
        "50",
        "50",
        "2",
    )
    assert (first["n"], first["delta"], first["verdict"], first["values"]) == ("3", "0", "within noise", "48 50 52")
    assert (first["commit"], first["recipe"], first["seconds"]) == ("aaaaaaa", "12345678", "12")


def test_latex_escapes_and_html_needs_nothing_from_outside():
    ledger = make_ledger(tiny(title="50 % & <more>"), runs(), {})
    text = writing.latex(ledger)
    assert r"10 \%" in text
    assert r"50.00 $\pm$ 2.00" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") >= 4
    page = writing.html(ledger, b"png")
    assert "50 % &amp; &lt;more&gt;" in page
    assert "data:image/png;base64,cG5n" in page
    assert "http" not in page
    assert 'class="bad">✗ NOT met' in page
    assert page.index("What came out") < page.index("<table>") < page.index('<img src="data:'), "numbers first"


def test_records_survive_the_file_and_a_damaged_line_is_told(tmp_path):
    path = tmp_path / "runs.jsonl"
    write_records(path, runs())
    assert read_records(path) == runs()
    path.write_text(path.read_text() + '{"block": 1\n')
    with pytest.raises(Problem, match=r"runs\.jsonl line 7 is not a run"):
        read_records(path)
