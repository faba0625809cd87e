"""The environment of a Ray cluster that serves: variables that Ray Serve reads when its processes start.

Ray Serve takes these settings from nowhere else. A variable that is set already keeps its value.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.engine.options import OptionError

__all__ = ["admin_key", "apply", "free_ports", "joined", "own", "set_admin_key", "write_program"]

HARD_STOP_SECONDS = 3600
"""How long connections that an HAProxy has accepted may live on after its configuration has changed."""

PACKAGES = Path(__file__).parents[2]
PROXY = "holdfast-haproxy"
PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"
ADMIN_KEY = "HOLDFAST_ADMIN_KEY"

COMMON = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HARD_STOP_SECONDS),
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
}


def write_program(folder: Path) -> Path:
    """Write the HAProxy program of this installation (`haproxy.py`)."""
    program = folder / PROXY
    program.write_text(
        f"#!{sys.executable}\nimport sys\n\nsys.path.insert(0, {str(PACKAGES)!r})\n"
        "from holdfast.replicas.haproxy import main\n\nmain()\n",
        encoding="utf-8",
    )
    program.chmod(0o700)
    return program


def write_token(folder: Path) -> Path:
    """Write a new token, which Ray's processes show each other; Ray would keep one in the home otherwise."""
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32), encoding="utf-8")
    return path


def own(folder: Path) -> dict[str, str]:
    """Variables of a cluster of its own: files in `folder` and free ports, so that several can run."""
    program = write_program(folder)
    ports = free_ports(4)
    threads = len(os.sched_getaffinity(0))
    return {
        **COMMON,
        # Has Ray listen on loopback; it takes every name of that for the machine's address otherwise.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(write_token(folder)),
        PROGRAM: str(program),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, threads)),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[3]),
    }


def joined() -> dict[str, str]:
    """Variables for a cluster that others have started; its machines have the same installation."""
    beside = shutil.which(PROXY, path=str(Path(sys.executable).parent))
    program = os.environ.get(PROGRAM) or beside or shutil.which(PROXY)
    if program is None:
        raise OptionError("ray_address", f"needs the program {PROXY} of `pip install 'holdfast[cluster]'`")
    kept = {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}
    return {**COMMON, PROGRAM: program, **kept}


def apply(variables: Mapping[str, str]) -> None:
    """Set variables of this process, and of those that it starts, unless they are set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def admin_key() -> str | None:
    """The admin key, which is not in a plan: Ray would show it."""
    return os.environ.get(ADMIN_KEY)


def set_admin_key(key: str) -> None:
    """Set the admin key for the processes of a cluster of its own."""
    os.environ[ADMIN_KEY] = key


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free at the moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
