"""Ctrl-C while a server starts: all of its processes are told, also in the middle of their imports."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROCESSES = {"holdfast.server.text.process", "holdfast.server.link.worker"}


def child_of(parent: int, module: str) -> int | None:
    """The child of a process that runs a module."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            of_parent = int(path.read_text().rpartition(")")[2].split()[1]) == parent
            if of_parent and module.encode() in path.with_name("cmdline").read_bytes():
                return int(path.parent.name)
        except OSError:
            continue  # It has ended.
    return None


def imports(process: int) -> bool:
    """Whether a process has begun to import packages that are not Python's."""
    mapped = Path(f"/proc/{process}/maps").read_text()
    return any(name in mapped for name in ("/numpy/", "/torch/", "/msgspec/", "/tokenizers/"))


def test_the_server_alone_decides_what_an_interrupt_ends() -> None:
    """A terminal sends it to the whole group. A process that it ended would say so with a traceback."""
    command = [sys.executable, "-m", "holdfast.cli", "serve", "echo", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    children: dict[str, int] = {}
    interrupts = dict.fromkeys(PROCESSES, 0)
    try:
        end = time.monotonic() + 60
        while min(interrupts.values()) < 15:
            assert time.monotonic() < end and server.poll() is None
            for module in PROCESSES - children.keys():
                child = child_of(server.pid, module)
                if child is not None and imports(child):
                    children[module] = child
            for module, child in children.items():
                interrupts[module] += 1
                os.kill(child, signal.SIGINT)
            time.sleep(0.1 if children.keys() == PROCESSES else 0.03)
        assert {module: child_of(server.pid, module) for module in PROCESSES} == children
        server.send_signal(signal.SIGINT)
        output, _ = server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert "Traceback" not in output and "KeyboardInterrupt" not in output
