"""The preloaded process: imports the command and the server once, then forks a process for each request.

Run by `commands` as `python -m tests.preloaded.nursery DESCRIPTOR PADDING`. A request is a packet on the
socket DESCRIPTOR, with the standard streams of the new process. That process is the child of a child that
ends at once, so it becomes a child of the nearest subreaper, which is the process that asked. The padding
is room for the command lines that forks show in /proc.
"""

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import resource
import runpy
import socket
import sys
import termios
import threading
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "holdfast.cli.serve",
    "holdfast.cli.chat",
    "holdfast.cli.chat_local",
    "holdfast.cli.chat_remote",
    "holdfast.cli.top",
    "holdfast.cli.sessions",
    "holdfast.cli.bench",
    "holdfast.cli.bench_remote",
    "holdfast.cli.sim",
    "holdfast.server.serve",
    "holdfast.server.link.worker",
    "holdfast.cli.engine",
    "holdfast.server.link.engine_process",
    "tests.preloaded.text",
)
MAIN = ("holdfast.cli.__main__", "holdfast.server.link.worker")
"""Run by their name in the new process, as `python -m` does."""
REQUEST_BYTES = 1 << 18
CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def fork_on_request(channel: socket.socket) -> dict[str, Any]:
    """Answer requests; returns in each new process, with its request."""
    while True:
        content, _, _, _ = message = socket.recv_fds(channel, REQUEST_BYTES, 3)
        streams = message[1]
        if not content:
            sys.exit(0)
        source, sink = os.pipe()
        first = os.fork()
        if first:
            os.close(sink)
            os.waitpid(first, 0)
            channel.send(os.read(source, 16))
            for descriptor in (source, *streams):
                os.close(descriptor)
            continue
        second = os.fork()
        if second:
            os.write(sink, b"%d" % second)
            os._exit(0)
        channel.close()
        os.close(source)
        os.close(sink)
        for place, descriptor in enumerate(streams):
            os.dup2(descriptor, place)
            os.close(descriptor)
        request: dict[str, Any] = json.loads(content)
        return request


def become(request: dict[str, Any]) -> None:
    """Take on environment, limit, network, directory, terminal, streams and command line of a request."""
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["descriptors"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (request["descriptors"], request["descriptors"]))
    if request["network"] is not None:
        enter_network(request["network"])
    if request["machine"] is not None:
        be_on(request["machine"])
    os.chdir(request["directory"])
    sys.path[0] = request["directory"]
    if request["terminal"]:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8")  # noqa: SIM115
    sys.stdout = _writer(1, "strict", os.isatty(1))
    sys.stderr = _writer(2, "backslashreplace", True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    show_command([sys.executable, "-m", request["module"], *request["arguments"]])
    sys.argv = [request["module"], *request["arguments"]]


def enter_network(path: str) -> None:
    """Be in the network namespace of a file from now on; threads that are started later are too."""
    with Path(path).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def be_on(boot_id: str) -> None:
    """Be on another machine, as far as its boot id says, which is in a file."""
    library = ctypes.CDLL(None, use_errno=True)
    if (
        library.unshare(CLONE_NEWNS)
        or library.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        or library.mount(boot_id.encode(), BOOT_ID.encode(), None, MS_BIND, None)
    ):
        raise OSError(ctypes.get_errno(), f"cannot mount {boot_id}")


def _writer(descriptor: int, errors: str, lines: bool) -> io.TextIOWrapper:
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=lines)


def show_command(words: list[str]) -> None:
    """Show a command line in /proc, in place of the one that this process was started with."""
    start, end = (
        int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47]
    )
    content = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def run(module: str) -> NoReturn:
    """Run a module as `python -m` does, and end as an interpreter ends, but without taking modules apart."""
    status: object = 0
    try:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
        status = 1
    try:
        sys.stdout.flush()
    except OSError:
        status = 120
    os._exit(status if isinstance(status, int) else 0)


def preload() -> None:
    """Import what the command and the server import, and keep it out of the way of the collector."""
    for name in PRELOADED:
        import_module(name)
    for name in MAIN:
        sys.modules.pop(name, None)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    preload()
    requested = fork_on_request(socket.socket(fileno=int(sys.argv[1])))
    become(requested)
    if requested["arguments"][:1] == ["serve"]:
        import_module("tests.preloaded.engine").fork_engines()
        import_module("tests.preloaded.text").fork_text_processes()
    if requested["arguments"][:1] == ["bench"]:
        import_module("tests.preloaded.benchmarks").fork_children()
    run(requested["module"])
