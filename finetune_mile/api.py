"""The commands for Python: the same checks, sentences and files, with plain data as the answer. No torch here.

A keyword is a flag, with `_` for `-`. Images and networks may be Python objects instead of text. What a command would
print as an error is raised as `Problem`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from finetune_mile.config.flags import SETTINGS, TYPES, RunOptions, empty_value, flag_of, init_text, resumed
from finetune_mile.core.files import read_scores
from finetune_mile.core.in_memory import SCHEME, named
from finetune_mile.core.problems import Problem
from finetune_mile.run import prepare, run
from finetune_mile.training.embedding import Embedding
from finetune_mile.training.folder import read_info
from finetune_mile.verbs import audit as auditing
from finetune_mile.verbs import embed as embedding
from finetune_mile.verbs import evaluate as evaluation
from finetune_mile.verbs import probe as probing

if TYPE_CHECKING:
    import datasets
    from torch import nn
    from torch.utils.data import Dataset

    from finetune_mile.checkpoints.classifier import ImageClassifier
    from finetune_mile.compute.rows import Split
    from finetune_mile.images.sets import ImageSet

    # Text as for --data; rows with an image and a label; items (PIL image, int); (paths, labels).
    OneSet: TypeAlias = datasets.Dataset | Dataset[Any]
    Images: TypeAlias = str | Path | OneSet | Mapping[str, OneSet] | tuple[Sequence[str | Path], Sequence[Any]]
    Network: TypeAlias = str | Path | nn.Module  # text as for --init; or a module as in `train`


Answer = TypeVar("Answer")
_TRAINED = threading.Event()  # set by the first call of `train`


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder."""

    folder: Path
    network: nn.Module | None = None  # of a run that was given a network of the user's own

    @classmethod
    def open(cls, folder: str | Path, network: nn.Module | None = None) -> Run:
        """A run that was made before, by Python or by the command; `network` as in `load_classifier`."""
        if not (Path(folder) / "recipe.yaml").is_file():
            raise Problem(f"{folder}: not a run folder (it has no recipe.yaml)")
        return cls(Path(folder), network)

    @property
    def results(self) -> dict[str, float]:
        """The final scores: the content of results.json."""
        return read_scores(self._file("results.json"))

    @property
    def labels(self) -> Any:
        """Labels of the training images, a `pyarrow.Table`: id, given, found, probability (`.to_pandas()`)."""
        import pyarrow.parquet as pq

        return pq.read_table(self._file("labels.parquet"))

    @property
    def report(self) -> Path:
        """The page to open in a browser."""
        return self._file("report.html")

    def audit(self, data: Images | None = None, **flags: Any) -> dict[str, Any]:
        """Find labels that are wrong or missing, as `finetune-mile audit` does; returns the content of audit.json.

        Args:
            data: of the run, where it was given as an object.
            flags: of the command, such as `init`, `size`, `out`; `apply` (ticks.csv) writes corrected data into `out`.
        """
        with named(data) as (data_name,):
            options = auditing.build_parser().fill({"what": str(self.folder), **flags})
            if options.apply is not None:
                return auditing.clean(options)
            how, run = auditing.check(options, data_name)
            from finetune_mile.training.auditing import audit

            facts, folder = _done(lambda *processes: audit(how, run, options.out, *processes))
            return facts | {"folder": str(folder)}

    def classifier(self) -> ImageClassifier:
        """The trained network, with `.predict`."""
        from finetune_mile import load_classifier

        return load_classifier(self.folder, self.network)

    def _file(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            status = read_info(self.folder).get("status", "unknown")
            fix = "its recipe says not to write it" if status == "finished" else "continue it with train(resume=FOLDER)"
            raise Problem(f"{self.folder}: there is no {name} (the run is {status}); {fix}")
        return path


def train(
    data: Images | None = None,
    init: Network | None = None,
    *,
    method: str | None = None,
    fraction: float | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
    keep_checkpoints: bool = False,
    refit: bool = False,
    **settings: Any,
) -> Run:
    """Train, as `finetune-mile train` does, and return the finished run.

    Args:
        data: text as for `--data`; or a `datasets.Dataset` or `DatasetDict` with an image and a label column. It can
            also be a torch `Dataset` of (PIL image, int), a dict of them (train, val, test), or two lists,
            (paths, labels). Without validation images of its own, a fifth of each class is held out.
        init: text as for `--init`, or a module that turns images (B, 3, H, W) into features (B, D) and has
            `num_features`. A module is copied, and not changed.
        method: as for `--method`: mile, softmax, sigmoid, ...
        fraction: share of the labels to use.
        out: the run folder; None: runs/<recipe>-<number>.
        resume: continue this run folder, with its own settings; give `data` and `init` again if they were objects.
            "auto": start the run in `out`, or continue it; nothing to do where it is finished.
        overwrite: replace a run that is in `out`.
        keep_checkpoints: keep the checkpoints of the finished run.
        refit: at the end, train on all labels, those of the validation images included; the scores are those before.
        settings: any other setting of a recipe, such as `steps=100`, `recipe="..."`, or `**{"mile.rho": 0.5}`; and
            `format`, as in `load`.
    """
    with named(data, init) as (data_name, init_name):
        texts = {"data": data_name, "init": init_name}
        if resume not in (None, "auto"):  # the recipe has the names of objects
            texts = {key: text for key, text in texts.items() if not (text or "").startswith(f"{SCHEME}:")}
        given = texts | {"method": method, "fraction": fraction} | settings
        options = RunOptions(
            format=given.pop("format", None),
            settings=_settings(given),
            out=None if out is None else Path(_given("out", out)),
            resume=None if resume is None else resumed(_given("resume", resume)),
            overwrite=overwrite,
            keep_checkpoints=keep_checkpoints,
            refit=refit,
        )
        options.check()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and _TRAINED.is_set():
            raise Problem(
                "train was called again in one of several processes, and the first call has closed their connections; "
                "start one script per run"
            )
        with _accelerator_of_its_own():
            prepared = prepare(options)
            _TRAINED.set()
            code = run(*prepared)
    _raise_if_stopped(code)
    return Run(prepared[2], None if init is None or isinstance(init, str | Path) else init)


def embed(init: Network, data: Images, **flags: Any) -> dict[Split, dict[str, Any]]:
    """Compute the features of a checkpoint, as `finetune-mile embed` does.

    Args:
        init: as in `train`.
        data: as in `train`; labels are not needed.
        flags: of the command, such as `out`, `size`, `batch_size`.

    Returns:
        For `train` and `val`: `ids` (N names), `labels` (N lists of class names) and `features`, an array (N, D). The
        array is read from disk when it is used. A row of NaN is an image that could not be read.
    """
    with named(init, data) as (init_name, data_name):
        options = embedding.build_parser().fill({"init": init_name, "data": data_name, **flags})
        how = Embedding.of_flags(options, [init_text(options.init, options.format)])
        more = {"path": options.out, "views": options.views}
        store, images = _done(lambda *processes: how.everything(*processes, **more))
    from finetune_mile.compute.rows import names_and_labels

    sets: dict[Split, ImageSet] = {"train": images.train, "val": images.val}
    answer = {}
    for split, each in sets.items():
        ids, labels = names_and_labels(each, images.classes)
        features = store.features(split if len(store.state(split)) else "train")[: len(ids)]
        answer[split] = {"ids": ids, "labels": labels, "features": features}
    return answer


def probe(init: Network | Sequence[Network], data: Images, **flags: Any) -> dict[str, Any]:
    """Compare checkpoints by k-NN and linear probes, as `finetune-mile probe` does; returns what its --json writes.

    Args:
        init: one or several, each as in `train`.
        data: as in `train`.
        flags: of the command, such as `fraction`, `seeds`, `k`.
    """
    inits = init if isinstance(init, list | tuple) else [init]
    with named(data, *inits) as (data_name, *names):
        probes = probing.check(probing.build_parser().fill({"init": names, "data": data_name, **flags}))
        return _done(probes.compare) or {}


def evaluate(
    model: Run | str | Path, data: Images | None = None, *, out: str | Path | None = None, **flags: Any
) -> dict[str, Any]:
    """Score a classifier, as `finetune-mile eval` does; returns the content of results.json.

    Args:
        model: a run, or text as for `--model`.
        data: as in `train`; None: the data of the run.
        out: write the files of the command into this folder; None: write nothing.
        flags: of the command, such as `part`, `truth`, `draws`; with `compare` the answer has a key `comparison`.
    """
    with named(data) as (data_name,):
        text = f"run:{model.folder}" if isinstance(model, Run) else str(model)
        values = {"model": text, "data": data_name, "out": out, **flags}
        options = evaluation.build_parser().fill(values)
        asked = evaluation.check(options)
        from finetune_mile.training import evaluation as evaluating

        with _accelerator_of_its_own():
            scored = evaluating.evaluate(asked)
    if scored is None:
        return {}
    if out is not None:
        evaluating.write(asked, scored, options.out)
    compared = {key: dataclasses.asdict(each) for key, each in scored.differences.items()}
    return scored.results | ({"comparison": compared} if compared else {})


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a recipe has them: a flag that is None was not given, any other setting that is None is null."""
    return {key: _plain(key, value) for key, value in given.items() if value is not None or key not in SETTINGS}


def _plain(key: str, value: Any) -> Any:
    """A value as YAML would have it."""
    value = value.tolist() if hasattr(value, "tolist") else str(value) if isinstance(value, Path) else value
    if isinstance(value, Mapping):
        return {name: _plain(key, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, each) for each in value]
    if isinstance(value, str) and key in SETTINGS:
        return TYPES.get(flag_of(key), str)(_given(key, value))
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise Problem(f"{key}: a {type(value).__name__} is not a value for a setting")


def _given(key: str, value: str | Path) -> str:
    """The text of a flag; an empty one is refused."""
    if not str(value).strip():
        raise Problem(empty_value(flag_of(key)))
    if "\0" in str(value):
        raise Problem(f"{flag_of(key)} {str(value)!r}: no file has a NUL character in its name; remove it")
    return str(value)


def _done(work: Callable[..., Answer]) -> Answer:
    """What `work(accelerator, signals)` returns; a signal stops it."""
    from finetune_mile.training.processes import stoppable

    answers: list[Answer] = []
    with _accelerator_of_its_own():
        code = stoppable(lambda *processes: answers.append(work(*processes)))
    _raise_if_stopped(code)
    return answers[0]


def _raise_if_stopped(code: int) -> None:
    """Where a signal has stopped the work, raise what that signal usually does."""
    if code == 130:
        raise KeyboardInterrupt("stopped; a run can be continued with train(resume=FOLDER)")
    if code:
        raise SystemExit(code)


@contextlib.contextmanager
def _accelerator_of_its_own() -> Iterator[None]:
    """Start without Accelerate's state, one per process, and put a caller's own back at the end."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states = [each._shared_state for each in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state, content in zip(states, before, strict=True):
            state.clear()
            state.update(content)
