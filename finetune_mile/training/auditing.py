"""Find labels that are wrong or missing, duplicates and outliers: what `audit` does. n photos, C classes."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from torch import Tensor

from finetune_mile.compute.passes import Outputs
from finetune_mile.compute.rows import SPLITS
from finetune_mile.config.resolve import resolve
from finetune_mile.core.files import check_empty, locked, whole_file, write_json
from finetune_mile.core.problems import Problem
from finetune_mile.images.bad_images import BadImages
from finetune_mile.images.checks import Findings, examine, find_copies
from finetune_mile.images.sets import Data
from finetune_mile.images.sources import load_data
from finetune_mile.measures.audit import Judged
from finetune_mile.measures.intervals import wilson
from finetune_mile.pages.audit import shown_text, write_audit_page
from finetune_mile.training.embedding import Embedding
from finetune_mile.training.evaluation import predictions_of
from finetune_mile.training.findings import DOUBTFUL, KINDS, Finding, Photos, find_all, ranked
from finetune_mile.training.folder import claim_folder
from finetune_mile.training.origin import Evaluation, parse_model
from finetune_mile.training.processes import Signals

COLUMNS = ("path", "given", "suggested", "probability_given", "probability_suggested", "kind")  # DESIGN.md
MORE_COLUMNS = ("rank", "probability_wrong", "split", "id", "other")
FACTS, REQUEST = "audit.json", "request.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """An audit, from reading the photos to the page."""

    how: Embedding  # checkpoint, data and features
    run: Path | None  # the run whose data are audited
    accelerator: Accelerator
    signals: Signals

    def request(self, data: Data) -> dict[str, Any]:
        """What decides the result; another audit of the same is not needed."""
        how = self.how
        return {
            "data": how.data, "init": how.inits[0].text, "arch": how.arch, "size": how.size,
            "run": None if self.run is None else str(self.run.resolve()), "labels": labels_hash(data),
        }  # fmt: skip

    def work(self, data: Data, out: Path) -> dict[str, Any]:
        """Judge all labels and write the files; returns the content of audit.json."""
        with locked(out / ".lock", f"{out}: another process is at work on this audit; wait for it"):
            photos = self.look(data)
            judged, rows, notes = find_all(photos, self.auto_bars())
            facts = self.facts(photos, judged, rows, notes)
            write_tables(out, photos, rows)
            write_audit_page(out, facts, photos, [row._asdict() for row in rows], self.signals.raise_if_caught)
            write_json(out / FACTS, facts)  # last: an audit that has it is finished
        return facts

    def look(self, data: Data) -> Photos:
        """Read every photo, and compute its features."""
        findings = {"train": examine(data.train, "train", self.how.workers)}
        findings["val"] = examine(data.val, "val", self.how.workers)
        for split, each in findings.items():
            BadImages.told(self.how.data, split, [each.images.ids[row] for row in each.bad])
        copies = find_copies(data, findings)
        self.signals.raise_if_caught()
        store = self.how.features(self.how.inits[0], data, self.accelerator, self.signals)
        parts = [store.rows(split) for split in SPLITS if len(store.state(split))]
        readable = torch.cat([part.readable for part in parts])
        features = Outputs(torch.cat([part.rows for part in parts]), readable & readable_of(findings))
        return Photos(data=data, features=features, copies=copies)

    def auto_bars(self) -> tuple[float, float]:
        """What method auto asks of photos before it adds labels."""
        flags = {"init": self.how.inits[0].text, "data": self.how.data, "method": "auto"}
        block = resolve(flags, []).recipe.block.auto
        return block.v_min, block.g_min

    def facts(self, photos: Photos, judged: Judged, rows: list[Finding], notes: list[str]) -> dict[str, Any]:
        """The content of audit.json."""
        data, known = photos.data, photos.known
        several = photos.given.ndim == 2
        wrong = judged.wrong.amax(1) if several else judged.wrong
        of_label = judged.wrong[photos.given[known] > 0] if several else wrong
        doubtful = torch.zeros(len(known), dtype=torch.bool)
        doubtful[known] = wrong > DOUBTFUL
        counts = Counter(row.kind for row in rows)
        facts = {
            "name": data.name, "request": self.request(data), "started_in": str(Path.cwd()),
            "classes": list(data.classes),
            "several": several, "photos": len(known), "labelled": int(known.sum()), "labels": len(of_label),
            "unread": int((~photos.features.readable).sum()), "counts": {kind: counts[kind] for kind in KINDS},
            "shares": {name: list(values) for name, values in judged.shares.items()},
            "expected": expected_errors(of_label, rows),
            "doubtful": {
                "train": int(doubtful[: len(data.train)].sum()), "val": int(doubtful[len(data.train) :].sum())
            },
            "accuracy": self.accuracies(photos, judged, doubtful), "notes": notes,
        }  # fmt: skip
        return facts | {"sentences": say_audit(facts), "about": {"missing": " ".join(notes)} if notes else {}}

    def accuracies(self, photos: Photos, judged: Judged, doubtful: Tensor) -> dict[str, Any]:
        """Accuracy on the validation photos, in per cent with its interval: on all, and without doubtful labels."""
        if photos.given.ndim == 2:
            return {}
        right = torch.full((len(photos.known),), torch.nan)
        right[photos.known] = (judged.logits.argmax(1) == photos.given[photos.known]).float()
        start = len(photos.data.train)
        scores = {"probe": right[start:]}
        if self.run is not None and (self.run / "export/config.json").is_file():
            scores["run"] = self.right_of_run(photos.data)
        return {
            name: {
                "all": _share(values[~values.isnan()]), "without": _share(values[~values.isnan() & ~doubtful[start:]])
            }
            for name, values in scores.items()
        }  # fmt: skip

    def right_of_run(self, data: Data) -> Tensor:
        """(N,) whether the run gives each validation photo its label; NaN where it has none."""
        model = parse_model(f"run:{self.run}", "--model")
        how = Evaluation(model=model, data=self.how.data, part="val", workers=self.how.workers)
        predicted = predictions_of(how, model, self.accelerator)
        row = {name: number for number, name in enumerate(data.val.ids)}
        right = torch.full((len(data.val),), torch.nan)
        places = torch.tensor([row[name] for name in predicted.ids])
        hits = (predicted.logits.argmax(1) == predicted.given).float()
        right[places] = torch.where(predicted.given >= 0, hits, torch.nan)
        return right


def labels_hash(data: Data) -> str:
    """A hash of all ids and labels."""
    digest = hashlib.sha256()
    for images in (data.train, data.val):
        digest.update("".join(f"{name}\n" for name in images.ids).encode("utf-8", "surrogateescape"))
        digest.update(images.given.numpy().tobytes())
    return digest.hexdigest()


def readable_of(findings: Mapping[str, Findings]) -> Tensor:
    """(n,) which photos could be read, of all splits."""
    return torch.tensor([row not in each.bad for each in findings.values() for row in range(len(each.images))])


def _share(right: Tensor) -> dict[str, float]:
    mean = float(right.mean()) if len(right) else 0.0
    low, high = wilson(mean, len(right))
    return {"accuracy": 100 * mean, "low": 100 * low, "high": 100 * high, "photos": len(right)}


def expected_errors(wrong: Tensor, rows: Sequence[Finding]) -> dict[str, Any]:
    """How many given labels are expected to be wrong: of all, of the list, and of the best cut of the list.

    The cut is where the probability of an error falls below DOUBTFUL. `others`: rounded probabilities of the labels
    that are not on the list, and how many have each.

    Args:
        wrong: probabilities (L,) of all given labels.
        rows: the findings; those of kind wrong are the labels with the highest ones.
    """
    chances = [row.probability_wrong or 0.0 for row in rows if row.kind == "wrong"]
    cut = [chance for chance in chances if chance > DOUBTFUL]
    others = wrong.double().sort().values[: len(wrong) - len(chances)].clamp(min=1e-6)
    values, counts = (10 * others.log10()).round().unique(return_counts=True)
    return {
        "all": float(wrong.sum()), "listed": sum(chances), "cut": len(cut), "in_cut": sum(cut),
        "others": [[10 ** (value / 10), count] for value, count in zip(values.tolist(), counts.tolist(), strict=True)],
    }  # fmt: skip


def say_audit(facts: Mapping[str, Any]) -> list[str]:
    """What the page and the command say first."""
    share, low, high = facts["shares"]["wrong"]
    labels, expected, doubtful = facts["labels"], facts["expected"], facts["doubtful"]
    said = [
        f"{facts['labelled']:,} labelled photos: about {share * labels:,.0f} of {labels:,} labels are wrong "
        f"({100 * share:.1f} %, 95 % interval {100 * low:.1f} to {100 * high:.1f})."
        + ("" if facts["several"] else " Errors between similar classes look like hard photos, so it is wide.")
    ]
    if expected["cut"]:
        said.append(
            f"The first {expected['cut']:,} of the list are more likely wrong than right: about "
            f"{expected['in_cut']:,.0f} of them are errors. The complete list holds about {expected['listed']:,.0f}."
        )
    else:
        said.append("No single label is more likely wrong than right.")
    if "missing" in facts["shares"]:
        share, low, high = facts["shares"]["missing"]
        said.append(
            f"About {100 * share:.1f} % of the classes in the photos are not given "
            f"(95 % interval {100 * low:.1f} to {100 * high:.1f})."
        )
    said.append(f"Doubtful labels: {doubtful['train']:,} in training, {doubtful['val']:,} in validation.")
    names = {"probe": "a probe of these features", "run": "the run"}
    for name, scores in facts["accuracy"].items():
        every, without = scores["all"], scores["without"]
        said.append(
            f"Validation accuracy of {names[name]}: {every['accuracy']:.1f} % (95 % interval {every['low']:.1f} to "
            f"{every['high']:.1f}) on {every['photos']:,} photos."
            + (
                f" Without the doubtful labels it is {without['accuracy']:.1f} %, which is too high: some of those are "
                "hard photos with right labels."
                if doubtful["val"]
                else ""
            )
        )
    if facts["unread"]:
        said.append(f"{facts['unread']:,} photos could not be read and are left out.")
    return said


# ------------------------------------------------------------------------------------ where


def audit(
    how: Embedding, run: Path | None, out: Path | None, accelerator: Accelerator, signals: Signals
) -> tuple[dict[str, Any], Path]:
    """The audit in its folder, made now or before: the content of audit.json, and the folder.

    Args:
        how: checkpoint, data and features.
        run: whose data they are.
        out: the folder; None: audit/ of the run, else a new one below runs/.
        accelerator: of this process.
        signals: that stop the work.
    """
    work = Audit(how=how, run=run, accelerator=accelerator, signals=signals)
    data = load_data(how.data)
    request = work.request(data)
    folder = choose_folder(out or (None if run is None else run / "audit"), request)
    if (folder / FACTS).is_file():
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        return facts, folder
    write_json(folder / REQUEST, request)
    return work.work(data, folder), folder


def choose_folder(out: Path | None, request: Mapping[str, Any]) -> Path:
    """The folder of an audit: the one that was begun with the same request, else a new one."""
    begun = [out] if out is not None else sorted(Path("runs").glob("audit-*"))
    for folder in begun:
        if (folder / REQUEST).is_file() and json.loads((folder / REQUEST).read_text(encoding="utf-8")) == request:
            return folder
    if out is None:
        return claim_folder(Path("runs"), "audit")
    if (out / REQUEST).is_file():
        raise Problem(f"{out}: holds an audit of other data, labels or settings; choose another folder with --out")
    check_empty(out, "--out")
    out.mkdir(parents=True, exist_ok=True)
    return out


# ------------------------------------------------------------------------------------ audit.csv, audit.parquet


def write_tables(out: Path, photos: Photos, rows: Sequence[Finding]) -> None:
    """Write audit.csv, for people and spreadsheets, and audit.parquet, for programs."""
    lines = []
    for rank, row in ranked(rows):
        split, _ = photos.places[row.photo]
        lines.append({
            "path": shown_text(photos.paths[row.photo]), "given": ";".join(row.given),
            "suggested": ";".join(row.suggested), "probability_given": _number(row.probability_given),
            "probability_suggested": _number(row.probability_suggested), "kind": row.kind, "rank": rank,
            "probability_wrong": row.probability_wrong, "split": split, "id": shown_text(photos.ids[row.photo]),
            "other": "" if row.other is None else shown_text(photos.paths[row.other]),
        })  # fmt: skip
    text, number = pa.string(), pa.float64()
    kinds = (text, text, text, number, number, text, pa.int64(), number, text, text, text)
    schema = pa.schema(list(zip((*COLUMNS, *MORE_COLUMNS), kinds, strict=True)))
    with whole_file(out / "audit.parquet") as part:
        pq.write_table(pa.Table.from_pylist(lines, schema=schema), part)
    with whole_file(out / "audit.csv") as part, part.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(schema.names)
        table.writerows([_cell(line[name]) for name in schema.names] for line in lines)


def _number(value: float) -> float | None:
    return None if value != value else value


def _cell(value: object) -> str:
    """A cell of a CSV file that no spreadsheet takes for a formula."""
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else quoted(str(value))


def quoted(text: str) -> str:
    """Text that begins like a formula, with an apostrophe before it; `unquoted` removes that."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "'")) else text


def unquoted(text: str) -> str:
    return text.removeprefix("'")
