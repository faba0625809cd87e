"""Progress on standard error: bars and a status line on a terminal, plain lines elsewhere.

Bars for fetching and loading a model and for writing its sessions to disk; a status line for benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

__all__ = ["StartProgress", "status_line"]

STAGES = {
    "fetch": "Downloading {model}",
    "load": "Loading {model}",
    "capture": "Capturing CUDA graphs of {model}",
    "spill": "Writing {total} sessions of {model} to disk",
}
COUNTED = "spill"
"""The stage that counts sessions; the others count bytes."""


class _Amount(DownloadColumn):
    """Done and total of a stage."""

    def render(self, task: Task) -> Text:
        if task.fields["stage"] != COUNTED:
            return super().render(task)
        return Text(f"{task.completed:.0f}/{task.total:.0f}", style="progress.download")


class StartProgress:
    """Called with (stage, done, total); shows one bar per stage."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _Amount(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> StartProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Update the bar of a stage."""
        if stage not in self._tasks:
            description = STAGES[stage].format(model=self._model, total=total)
            self._tasks[stage] = self._bars.add_task(description, total=total, stage=stage)
            if not self._console.is_terminal:
                self._console.print(description, highlight=False, markup=False)
        self._bars.update(self._tasks[stage], completed=done, total=total)


@contextmanager
def status_line(title: str) -> Iterator[Callable[[str], None]]:
    """A function that shows one line at a time: in place on a terminal, one after the other elsewhere."""
    console = Console(stderr=True)
    with console.status(title) as status:

        def show(line: str) -> None:
            if console.is_terminal:
                status.update(f"{title}: {line}")
            else:
                console.print(f"{title}: {line}", highlight=False, markup=False, soft_wrap=True)

        yield show
