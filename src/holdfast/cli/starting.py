"""Starting a model for a command: progress bars while it loads, and errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.cli.progress import StartProgress
from holdfast.cli.refusals import WRONG, refusal
from holdfast.engine.options import OptionError
from holdfast.engine.start.pull import PullError

__all__ = ["LoadProgress", "starting"]


class LoadProgress:
    """Progress bars while a model is downloaded and loaded and while its sessions are written to disk."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._shown: StartProgress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Update the bar of a stage."""
        if self._shown is None:
            self._shown = StartProgress(self._model).__enter__()
        self._shown(stage, done, total)
        if stage in ("load", "capture", "spill") and done >= total:
            self.stop()

    def stop(self) -> None:
        """Remove the bars."""
        if self._shown is not None:
            self._shown.__exit__(None, None, None)
            self._shown = None


@contextmanager
def starting(command: str, model: str) -> Iterator[LoadProgress]:
    """Run a command's model; an option or a model that cannot be had ends the command with one line."""
    progress = LoadProgress(model)
    try:
        yield progress
    except OptionError as error:
        raise refusal(command, error.typed, WRONG) from error
    except (PullError, ValueError) as error:
        raise refusal(command, str(error), WRONG) from error
    finally:
        progress.stop()
