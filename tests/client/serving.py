"""A real server process on a port of its own, with the model that needs no weights."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from holdfast.client import Client
from tests.plain import NO_TLS
from tests.preloaded import commands

READY = re.compile(r"Holdfast serves (\S+) on (http://\S+)")
HELD_BY_CLIENTS = ("TURN", "SESSION", "CHECKPOINT", "TRANSIT", "QUARANTINE", "COPY")


@contextmanager
def serving(log: Path, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[str]:
    """The address of a server that lives as long as the block; it must end with status 0."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with log.open("w") as errors:
        process = commands.Command(
            "serve", *arguments, "--port", "0", stdout=subprocess.PIPE, stderr=errors, text=True, env=settings
        )
    try:
        yield _address(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            assert process.stdout is not None
            process.stdout.close()
    assert status == 0, log.read_text()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        found = READY.match(line)
        if found is not None:
            return found[2]
    raise AssertionError(f"the server did not start: {log.read_text()}")


def assert_nothing_is_held(client: Client) -> None:
    """No session is open, no unit is held by one, and the audit has found nothing."""
    assert client.sessions() == []
    # Chats that were sent whole have hidden sessions.
    httpx.post(f"{client.url}/flush_cache", verify=NO_TLS).raise_for_status()
    report = client.memory()
    assert report["findings"] == []
    for pool in report["pools"]:
        held = {kind: count for kind, count in pool["holders"].items() if kind in HELD_BY_CLIENTS and count}
        assert not held, f"{pool['component']} is held: {held}"
