"""`holdfast` commands as forks of the preloaded process, with the interface of `subprocess`."""

import atexit
import ctypes
import inspect
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.preloaded.nursery import BOOT_ID

ROOT = Path(__file__).parents[2]
MODULE = "holdfast.cli"
READ_AT_START = (
    *("PYTHON", "OMP_", "MKL_", "KMP_", "TORCH", "TRITON", "CUDA", "LD_", "MALLOC"),
    *("FORCE_COLOR", "TERMINAL_", "_TYPER"),
)
"""How variables begin that interpreter and libraries read at their start: a fork cannot change them."""
PR_SET_CHILD_SUBREAPER = 36
PADDING = "-" * 4096
PYTHON = os.environ.get("HOLDFAST_PYTHON", sys.executable)
"""The interpreter of commands; tests of clients run in environments that do not have the project."""


class _Nursery:
    """The preloaded process of this process, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] | None = None
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether a fork can take on an environment.

        The preloaded process has the environment of the moment at which it is first needed: libraries that
        tests import before that set variables too.
        """
        if self._environment is None:
            self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return os.environ.get("HOLDFAST_TESTS_EXECUTE") != "1" and _start(environment) == _start(
            self._environment
        )

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """A new child of this process; its number."""
        with self._lock:
            channel = self._channel or self._begin()
            self._prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(channel, [json.dumps(request).encode()], streams)
                answer = channel.recv(16)
            finally:
                self._prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert answer, "the preloaded process has ended"
        return int(answer)

    def _begin(self) -> socket.socket:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "tests.preloaded.nursery", str(theirs.fileno()), PADDING],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=self._environment,
            )
        atexit.register(self._end)
        return self._channel

    def _end(self) -> None:
        assert self._channel is not None and self._process is not None
        self._channel.close()
        self._process.wait()


def _start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


NURSERY = _Nursery()
SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class Command(subprocess.Popen[Any]):
    """The process of a `holdfast` command. Only its start differs from that of `subprocess.Popen`."""

    def __init__(
        self,
        *arguments: str,
        module: str = MODULE,
        env: dict[str, str] | None = None,
        descriptors: int | None = None,
        network: str | None = None,
        machine: str | None = None,
        **options: Any,
    ) -> None:
        """`module` is the one that is run, by default the command; it may open so many `descriptors`.

        `network` is the file of a network namespace, `machine` that of the boot id of another machine.
        """
        self._words = (module, *arguments)
        self._limits = {"descriptors": descriptors, "network": network, "machine": machine}
        self._settings = {**os.environ, "OMP_NUM_THREADS": "1"} if env is None else env
        super().__init__([PYTHON, "-m", module, *arguments], env=self._settings, **options)

    def _execute_child(self, *arguments: Any) -> None:
        given = SIGNATURE.bind(self, *arguments).arguments
        if given["preexec_fn"] is not None or given["pass_fds"] or not NURSERY.fits(self._settings):
            assert not any(self._limits.values()), "only a fork can be limited"
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [place if end == -1 else end for place, end in enumerate(ends)]
        request = _request(self._words, self._settings, given["cwd"]) | self._limits
        self.pid = NURSERY.fork(request, streams)
        self._child_created = True
        mine = (given["p2cwrite"], given["c2pread"], given["errread"])
        pipes = {end for end, kept in zip(ends, mine, strict=True) if kept != -1}
        null = getattr(self, "_devnull", None)
        for end in pipes if null is None else {*pipes, null}:
            os.close(end)


def _request(
    words: tuple[str, ...], settings: dict[str, str], directory: Any = None, terminal: bool = False
) -> dict[str, Any]:
    return {
        "module": words[0],
        "arguments": words[1:],
        "environment": settings,
        "directory": str(directory or Path.cwd()),
        "terminal": terminal,
        "descriptors": None,
        "network": None,
        "machine": None,
    }


def start_in_terminal(*arguments: str, env: dict[str, str]) -> tuple[int, int]:
    """Start a `holdfast` command in a terminal of its own: its process and the terminal's other side."""
    if NURSERY.fits(env):
        ours, theirs = pty.openpty()
        try:
            return NURSERY.fork(_request((MODULE, *arguments), env, terminal=True), [theirs] * 3), ours
        finally:
            os.close(theirs)
    pid, ours = pty.fork()
    if pid == 0:
        os.execve(PYTHON, [PYTHON, "-m", MODULE, *arguments], env)
    return pid, ours


def start(
    *arguments: str,
    descriptors: int | None = None,
    network: str | None = None,
    machine: str | None = None,
    execute: bool = False,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start a `holdfast` command, to `execute` it in a new interpreter; it may open so many `descriptors`.

    `network` is the file of a network namespace, `machine` that of the boot id of another machine.
    """
    if execute or os.environ.get("HOLDFAST_TESTS_EXECUTE") == "1":
        limited = ("bash", "-c", f'ulimit -n {descriptors}; exec "$@"', "bash") if descriptors else ()
        inside = ("nsenter", f"--net={network}") if network else ()
        mounted = ("unshare", "--mount", "sh", "-c", f'mount --bind {machine} {BOOT_ID}; exec "$@"', "sh")
        elsewhere = mounted if machine else ()
        return subprocess.Popen([*inside, *elsewhere, *limited, PYTHON, "-m", MODULE, *arguments], **options)
    return Command(*arguments, descriptors=descriptors, network=network, machine=machine, **options)


def run(
    *arguments: str, said: Any = None, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a `holdfast` command to its end, as `subprocess.run(..., capture_output=True)` does."""
    with Command(
        *arguments,
        stdin=subprocess.DEVNULL if said is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    ) as process:
        try:
            output, errors = process.communicate(said, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
