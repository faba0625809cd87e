"""A real process in a pseudo-terminal, to be talked to like a person would."""

import os
import re
import select
import signal
import time
from types import TracebackType

from tests.preloaded import commands

SECONDS_MAX = 120.0
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """The `holdfast` command with a terminal of its own. What it shows is read as text without colours."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        settings = {
            **os.environ,
            "TERM": "xterm",
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self.pid, self.file = commands.start_in_terminal(*arguments, env=settings)
        self.shown = ""
        self.status: int | None = None

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.file)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.file, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C: the terminal turns it into a signal."""
        self.type("\x03")

    def until(self, pattern: str) -> str:
        """Read until something is shown; returns everything up to its end."""
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            found = re.search(pattern, self.shown)
            if found is not None:
                before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
                return before
            assert time.monotonic() < deadline, f"{pattern!r} was not shown, but {self.shown!r}"
            assert self._read(deadline), f"it ended before {pattern!r}: {self.shown!r}"

    def end(self) -> tuple[int, str]:
        """Wait for the process to end: its exit status, and what it showed last."""
        deadline = time.monotonic() + SECONDS_MAX
        while self._read(deadline):
            pass
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        return self.status, self.shown

    def _read(self, deadline: float) -> bool:
        """Some more of what is shown; False at the end."""
        ready, _, _ = select.select([self.file], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"nothing more was shown after {self.shown!r}")
        try:
            text = os.read(self.file, 65536)
        except OSError:  # Linux answers the end of the other side with an error.
            return False
        self.shown += ESCAPE.sub("", text.decode(errors="replace")).replace("\r", "")
        return bool(text)
