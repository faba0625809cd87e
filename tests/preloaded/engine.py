"""The engine process of a preloaded server: a fork of the server instead of a new interpreter.

`fork_engines` replaces `asyncio.create_subprocess_exec` in the server, for the command line of the engine
alone. The child closes what it inherited, shows its own command line and runs the module; it never returns.
"""

import asyncio
import gc
import os
import signal
import sys
from typing import Any, NoReturn

from tests.preloaded.nursery import run, show_command

ENGINE = "holdfast.server.link.worker"
EXECUTE = asyncio.create_subprocess_exec


class Forked:
    """What the supervisor uses of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set_result(self.returncode)

    async def wait(self) -> int:
        """The exit status, once it has ended."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


async def start(*command: str, **options: Any) -> Any:
    """A fork for the engine, a new process for anything else."""
    if command[1:3] != ("-m", ENGINE) or options:
        return await EXECUTE(*command, **options)
    pid = os.fork()
    if pid == 0:
        be(ENGINE, command)
    return Forked(pid)


def be(module: str, command: tuple[str, ...]) -> NoReturn:
    """Run a module in a fork of the server, with a command line of its own and the standard streams alone."""
    try:
        gc.freeze()  # What belongs to the server is never collected here.
        signal.set_wakeup_fd(-1)
        # Those of the event loop too, of which Python knows nothing: that of SIGCHLD would wait forever.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        show_command(list(command))
        sys.argv = list(command[2:])
        run(module)
    finally:
        os._exit(1)


def fork_engines() -> None:
    """Have the supervisor of this server fork its engine processes."""
    asyncio.create_subprocess_exec = start
