"""`holdfast serve --replicas`: checks and preparations before Ray is imported.

A cluster on this machine belongs to the command: its files are in a private directory, it listens on
loopback only, and it ends with the command. Ray reads its environment when it is imported: that comes last.
"""

from __future__ import annotations

import signal
import socket
import tempfile
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from holdfast.engine.options import OptionError
from holdfast.engine.start.pull import ECHO_MODELS, resolve_model
from holdfast.replicas import surroundings
from holdfast.replicas.plan import Plan
from holdfast.server.http.keys import Keys
from holdfast.server.link.addresses import split_address
from holdfast.server.link.tls import client_context, write_keys
from holdfast.server.sessions import shown_name

__all__ = ["ClusterFailed", "Signals", "run"]

CONNECT_SECONDS = 5.0


class ClusterFailed(RuntimeError):
    """The cluster cannot serve; the message says why."""


class Signals:
    """Counts the signals that ask the process to end; the second one interrupts it."""

    def __init__(self) -> None:
        self.count = 0
        self._came = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)

    def _signalled(self, *_: object) -> None:
        self.count += 1
        self._came.set()
        if self.count > 1:
            raise KeyboardInterrupt

    def wait(self, seconds: float) -> bool:
        """Wait for a signal; whether one came."""
        return self._came.wait(seconds)


def run(plan: Plan, admin_key: str | None = None) -> int:
    """Serve a plan until a signal; raises `OptionError` or `ClusterFailed`."""
    Keys.read(plan.options)
    with tempfile.TemporaryDirectory(prefix="hf-") as folder:
        if plan.cluster.ray_address is None:
            plan = _checked(plan, Path(folder))
            variables = surroundings.own(Path(folder))
        else:
            _require_reachable(plan.cluster.ray_address)
            variables = surroundings.joined()
        surroundings.apply(variables)
        if admin_key is not None:
            surroundings.set_admin_key(admin_key)
        deploying = import_module("holdfast.replicas.deploying")
        try:
            return int(deploying.serve_plan(plan, variables))
        except KeyboardInterrupt:
            return 0


def _checked(plan: Plan, folder: Path) -> Plan:
    """The plan with what only this machine knows: a free port, paths, and keys if there are none."""
    server = dict(plan.server)
    server["port"] = _free_port(plan.options.host, plan.options.port)
    if not plan.link_keys:
        server["link_keys"] = str(folder / "link.pem")
        write_keys(Path(server["link_keys"]))
    client_context(server["link_keys"])
    model = plan.model
    if model not in ECHO_MODELS:
        server.setdefault("served_model_name", shown_name(model))
        model = str(resolve_model(model, lambda _done, _total: None, plan.engine.get("cache")))
    return replace(plan, model=model, server=server)


def _free_port(host: str, port: int) -> int:
    """The port, or a free one for 0; an error if it is taken. HAProxy binds it later."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OptionError(
                "port", f"{port} on {host} is not available: {error.strerror}; choose another, or 0"
            ) from error
        return int(probe.getsockname()[1])


def _require_reachable(address: str) -> None:
    """Raise if no process listens at an address; Ray itself would retry for a long time."""
    if address == "auto" or "://" in address:
        return
    host, port = split_address("ray_address", address)
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        why = error.strerror or str(error)
        started = "start Ray there with `ray start --head`, or leave the option out for a cluster here"
        raise OptionError("ray_address", f"{address} cannot be reached: {why}; {started}") from error
