"""What a run shows in the terminal: a bar while it works, a table when it is done."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from finetune_mile.core.console import PLAIN_SECONDS, open_console
from finetune_mile.core.times import duration as duration
from finetune_mile.measures import CLOSING, closing_rows

if TYPE_CHECKING:
    from rich.console import Console

    from finetune_mile.measures.intervals import Comparison


class Display:
    """Progress on stderr; quiet on every process but the first."""

    def __init__(
        self, total_steps: int, *, visible: bool, steps_per_epoch: float | None = None, after: float = 0
    ) -> None:  # fmt: skip
        """A bar over the steps, with the generation, or the epoch where `steps_per_epoch` is given.

        The time left has `after` more steps in it: those of what follows, such as the run after a trial.
        """
        self.console = open_console(stderr=True, quiet=not visible)
        self.total, self.steps_per_epoch, self.after = total_steps, steps_per_epoch, after
        self.unit = "generation" if steps_per_epoch is None else "epoch"
        self._bar: Progress | None = None
        self._labels: TaskID | None = None
        if self.console.is_terminal and visible:
            self._bar = Progress(
                TextColumn("[bold]{task.fields[phase]:<11}"), TextColumn(f"{self.unit} {{task.fields[generation]}}"),
                BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]:,.0f} images/s"),
                TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[left]}"), console=self.console,
            )  # fmt: skip
            self._task = self._bar.add_task(
                "", total=total_steps, phase="start", generation=0, speed=0.0, loss="-", left=""
            )
        self._last = self._began = time.monotonic()
        self._first = 0

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, step: int) -> None:
        """The run goes on after `step` steps."""
        self._last = self._began = time.monotonic()
        self._first = step
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def say(self, sentence: str, *, style: str | None = None) -> None:
        """A line above the bar."""
        self.console.print(sentence, style=style, highlight=False, markup=False, soft_wrap=True)

    def warn(self, sentence: str) -> None:
        """A warning above the bar."""
        self.say(f"warning: {sentence}", style="yellow")

    def step(self, step: int, phase: str, generation: int, speed: float, loss: float | None) -> None:
        if self.steps_per_epoch is not None:
            generation = int(step / self.steps_per_epoch)
        shown, now = "-" if loss is None else f"{loss:.3f}", time.monotonic()
        pace = (now - self._began) / max(step - self._first, 1)
        left = f"{duration(pace * (self.total - step + self.after))} left{' in all' if self.after else ''}"
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step, phase=phase, generation=generation, speed=speed, loss=shown, left=left
            )
        elif now - self._last > PLAIN_SECONDS or step == self.total:
            self._last = now
            self.say(  # losses of other phases are of other targets
                f"step {step}/{self.total}  {self.unit} {generation}  {speed:,.0f} images/s  "
                f"{phase} loss {shown}  {left}"
            )

    def labels(self, generation: int, done: int, images: int) -> None:
        """A teacher has labelled `done` of the `images` of a pool."""
        done = min(done, images)
        if self._bar is not None:
            if self._labels is None:
                self._labels = self._bar.add_task(
                    "", total=images, phase="labels", generation=generation, speed=0.0, loss="-", left=""
                )
            speed = next(task.speed for task in self._bar.tasks if task.id == self._labels)
            self._bar.update(self._labels, completed=done, speed=speed or 0.0)
            if done == images:
                self._bar.remove_task(self._labels)
                self._labels = None
        elif time.monotonic() - self._last > PLAIN_SECONDS:
            self._last = time.monotonic()
            self.say(f"labels of generation {generation}: {done:,} of {images:,} images")


def wide_console() -> Console:
    """For tables on stdout: as wide as the terminal, and wide enough where it goes to a file."""
    console = open_console(highlight=False)
    return console if console.is_terminal else open_console(highlight=False, width=160)


def closing_table(results: dict[str, float], title: str, method: str) -> Table:
    """The results that a reader looks for first."""
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    for key, value, unit, interval, meaning in closing_rows(results, method):
        table.add_row(f"[bold]{key}", f"{value}{unit and ' ' + unit}", f"[dim]{interval}", meaning)
    return table


# ------------------------------------------------------------------------------------ tables of `eval`

MEANING = {key: (meaning, unit) for key, meaning, unit in CLOSING} | {
    "top5": ("given label among the best five", "%"),
    "map": ("mean average precision over classes", "%"),
    "recovery_map": ("mean average precision of true labels that were not given (0-1)", ""),
}
SHOWN = (
    "accuracy", "top5", "real_acc", "f1@0.25", "f1@0.5", "f1@rho", "f1@best", "trivial_f1", "lrap", "map",
    "recovery_map", "coverage@0.25",
)  # fmt: skip


def scores_table(results: Mapping[str, float], about: Mapping[str, Any]) -> Table:
    """The main scores, their intervals and what they mean; `about` the predictions."""
    title = f"{about['model']} on {int(results['images']):,} images of {about['data']}"
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    for key in (key for key in SHOWN if key in results):
        meaning, unit = MEANING.get(key, ("F1 at the run's rho", "%"))
        digits = _digits(key)
        low, high = results.get(f"{key}_low"), results.get(f"{key}_high")
        between = "" if low is None or high is None else f"[dim]{low:.{digits}f} - {high:.{digits}f}"
        table.add_row(f"[bold]{key}", f"{results[key]:.{digits}f}{unit and ' ' + unit}", between, meaning)
    return table


def comparison_table(names: Sequence[str], differences: Mapping[str, Comparison]) -> Table:
    """Two models, paired; positive: the first one is ahead."""
    table = Table(title=escape(f"A {names[0]} - B {names[1]}, paired"), title_justify="left", box=None, pad_edge=False)
    for column in ("", "A", "B", "A - B", "95 %", "A ahead", "B ahead", "p (signs)"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for key in (key for key in SHOWN if key in differences):
        d, digits = differences[key], _digits(key)
        table.add_row(
            f"[bold]{key}", *(f"{v:.{digits}f}" for v in (d.a, d.b)), f"{d.difference:+.{digits}f}",
            f"{d.low:+.{digits}f} .. {d.high:+.{digits}f}", str(d.wins), str(d.losses), f"{d.p_value:.2g}",
        )  # fmt: skip
    return table


def _digits(key: str) -> int:
    return 4 if key == "recovery_map" else 2
