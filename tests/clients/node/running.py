"""Runs scripts and commands of Node: the packages that `npm ci` installed beside this file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PACKAGES = HERE / "node_modules"
NODE = Path(sys.executable).parent / "node"
SECONDS_MAX = 240

CALLING = 'First.\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


def require_node() -> None:
    """Skip a module whose packages are missing."""
    if not NODE.exists():
        pytest.skip(f"{NODE} is missing: run `make clients`", allow_module_level=True)
    if not PACKAGES.is_dir():
        pytest.skip(f"{PACKAGES} is missing: run `make clients`", allow_module_level=True)


def calling(name: str, **arguments: Any) -> str:
    """A text that is a call when the model repeats it."""
    return CALLING.format(name=name, arguments=json.dumps(arguments))


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a client: nothing of the user's, and node first on the path."""
    path = f"{NODE.parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(home), "NO_COLOR": "1", **more}


def run_script(name: str, *arguments: str) -> Any:
    """What a script of this folder prints: one JSON value."""
    command = [str(NODE), str(HERE / name), *arguments]
    done = subprocess.run(
        command, env=environment(HERE), capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_command(
    name: str, arguments: Sequence[str], folder: Path, variables: dict[str, str], typed: str = ""
) -> list[dict[str, Any]]:
    """What a command of the packages prints: one JSON object on each line. `typed` is its standard input."""
    done = subprocess.run(
        [str(PACKAGES / ".bin" / name), *arguments],
        env=variables,
        cwd=folder,
        input=typed,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def interrupt_command(
    name: str,
    arguments: Sequence[str],
    folder: Path,
    variables: dict[str, str],
    started: Callable[[], bool],
    typed: str = "",
) -> None:
    """Start a command of the packages and interrupt it, as Ctrl-C does, once `started` says so."""
    process = subprocess.Popen(
        [str(PACKAGES / ".bin" / name), *arguments],
        env=variables,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(typed)
        process.stdin.close()
        deadline = time.monotonic() + SECONDS_MAX
        while not started():
            assert process.poll() is None, "the command ended before it was interrupted"
            assert time.monotonic() < deadline, "the command sent no request"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(SECONDS_MAX)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def assert_loop(run: dict[str, Any]) -> None:
    """Two tools were called, each once: the second because of the first one's result. Then came an answer."""
    assert run["called"] == [["weather", {"city": "Rome", "days": 2}], ["price", {"city": "Rome"}]]
    assert "120 euros" in run["text"]
