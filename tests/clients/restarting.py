"""A server of one's own for a test that restarts it, on the same journal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
READY = re.compile(r"Holdfast serves \S+ on (http://\S+)")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server with a journal in `folder`; it must end with status 0."""
    python = os.environ.get("HOLDFAST_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    sizes = ["--kv-tokens", "8192", "--context-length", "2048", "--seed", "7"]
    command = [python, "-m", "holdfast.cli", "serve", "smollm2", "--port", "0", *sizes]
    command += ["--journal", str(folder / "sessions.journal")]
    with (folder / "errors").open("a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        found = next((match for line in process.stdout if (match := READY.search(line))), None)
        assert found is not None, (folder / "errors").read_text()
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=120)
    assert status == 0, (folder / "errors").read_text()
