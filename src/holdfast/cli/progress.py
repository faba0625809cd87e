"""Progress on standard error: bars, or lines without a terminal.

While a model is fetched and loaded, and while its sessions are written to disk at the end.
"""

from __future__ import annotations

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

__all__ = ["StartProgress"]

STAGES = {
    "fetch": "Fetching {model}",
    "load": "Loading {model}",
    "capture": "Capturing graphs of {model}",
    "spill": "Writing {total} sessions of {model} to disk",
}
COUNTED = "spill"
"""The stage whose amounts are sessions; of the others they are bytes."""


class _Amount(DownloadColumn):
    """How much of a stage is done."""

    def render(self, task: Task) -> Text:
        if task.fields["stage"] != COUNTED:
            return super().render(task)
        return Text(f"{task.completed:.0f}/{task.total:.0f}", style="progress.download")


class StartProgress:
    """Called with (stage, done, total); one bar for each stage that takes place."""

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
        """A stage has come so far."""
        if stage not in self._tasks:
            description = STAGES[stage].format(model=self._model, total=total)
            self._tasks[stage] = self._bars.add_task(description, total=total, stage=stage)
            if not self._console.is_terminal:
                self._console.print(description, highlight=False, markup=False)
        self._bars.update(self._tasks[stage], completed=done, total=total)
