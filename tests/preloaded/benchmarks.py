"""What a preloaded benchmark starts, servers and engines, as forks of it instead of new interpreters.

`fork_children` replaces how `subprocess.Popen` starts a process, for `python -m` and a module of `FORKED`
alone. Pipes, waiting and signals stay as they are.
"""

import inspect
import os
import subprocess
from typing import Any

from tests.preloaded.engine import be, fork_engines
from tests.preloaded.text import fork_text_processes

SERVE = ("holdfast.cli", "serve")
FORKED = ("holdfast.cli", "holdfast.bench.agents.inside", "holdfast.bench.wire.inside")
EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]
SIGNATURE = inspect.signature(EXECUTE)
OPTIONS = ("preexec_fn", "pass_fds", "cwd", "env", "start_new_session")


def start(process: subprocess.Popen[Any], *arguments: Any) -> None:
    """Fork, in place of `Popen._execute_child`, where that is possible."""
    given = SIGNATURE.bind(process, *arguments).arguments
    command = given["args"]
    is_module = isinstance(command, list | tuple) and len(command) > 2 and command[1] == "-m"
    if not is_module or command[2] not in FORKED or any(given[name] for name in OPTIONS):
        EXECUTE(process, *arguments)
        return
    ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    process.pid = os.fork()
    if process.pid == 0:
        become(tuple(command), ends)
    process._child_created = True  # type: ignore[attr-defined]
    mine = (given["p2cwrite"], given["c2pread"], given["errread"])
    for end in {end for end, kept in zip(ends, mine, strict=True) if kept != -1}:
        os.close(end)


def become(command: tuple[str, ...], ends: list[int]) -> None:
    """Run the module of a command with these streams; those that are -1 stay."""
    try:
        for place, end in enumerate(ends):
            if end != -1:
                os.dup2(end, place)
        subprocess.Popen._execute_child = EXECUTE  # type: ignore[attr-defined]
        if command[2:4] == SERVE:
            fork_engines()
            fork_text_processes()
        be(command[2], command)
    finally:
        os._exit(1)


def fork_children() -> None:
    """Have this process fork what it would execute."""
    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]
