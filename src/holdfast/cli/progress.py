"""Progress on standard error while a model is fetched and loaded: bars, or lines without a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

__all__ = ["StartProgress"]

STAGES = {"fetch": "Fetching", "load": "Loading", "capture": "Capturing graphs of"}


class StartProgress:
    """Called with (stage, done, total) in bytes; one bar for each stage that takes place."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
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
            description = f"{STAGES[stage]} {self._model}"
            self._tasks[stage] = self._bars.add_task(description, total=total)
            if not self._console.is_terminal:
                self._console.print(description, highlight=False, markup=False)
        self._bars.update(self._tasks[stage], completed=done, total=total)
