"""`holdfast engine`: an engine process alone, for API processes that connect over TCP.

It loads a model, listens, and serves the API processes that have its key (`peers.py`) with the loop that also
serves behind a supervisor (`worker.py`). It outlives API processes that come and go. SIGTERM (or Ctrl-C)
drains: new turns and sessions are declined, turns in flight may end within a time limit and are then rolled
back, sessions are written to disk, and the process exits with 0. A second signal skips the turns in flight, a
third the writing.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.engine.durable.membership import Membership
from holdfast.engine.durable.places import without_credentials
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.pauses import bound_pauses
from holdfast.engine.start.pull import ECHO_MODELS, resolve_model
from holdfast.engine.start.startup import open_loop
from holdfast.server.http.keys import Keys, warn_if_readable
from holdfast.server.link import wire
from holdfast.server.link.addresses import split_address
from holdfast.server.link.commands import EngineCommands
from holdfast.server.link.draining import Drain
from holdfast.server.link.hand_overs import HandOvers
from holdfast.server.link.peers import Peers
from holdfast.server.link.results import Outbox, stored_session
from holdfast.server.link.secure_socket import SecureSocket
from holdfast.server.link.snapshot_receiver import SnapshotReceiver
from holdfast.server.link.snapshot_sender import SnapshotSender
from holdfast.server.link.tls import client_context, server_context
from holdfast.server.link.worker import (
    FLUSH_SECONDS,
    SEAL_SECONDS,
    Worker,
    model_facts,
    stored_sessions,
    vocabulary_of,
)
from holdfast.server.options import EngineProcessOptions, ServerOptions
from holdfast.server.telemetry.logs import set_up_logging

__all__ = ["EngineHost", "SharedWorker", "model_digest", "run"]

log = logging.getLogger("holdfast.engine")

BACKLOG = 128
TOLD_AT_ONCE = 128
"""Sessions that a new API process is told of between two steps."""

WEIGHT_FILES = ("*.safetensors", "*.gguf")

Progress = Callable[[str, int, int], None]


def model_digest(facts: wire.ModelFacts, vocabulary: wire.Vocabulary) -> str:
    """What tells two models apart: tokenizer, configuration, sizes of the weights; not where they lie."""
    about = msgspec.structs.asdict(facts)
    for name in ("path", "plan", "fingerprint", "tokens_max", "device"):
        del about[name]
    digest = hashlib.sha256(msgspec.msgpack.encode([about, vocabulary], order="sorted"))
    path = Path(facts.path)
    files = [path] if path.is_file() else sorted(found for kind in WEIGHT_FILES for found in path.glob(kind))
    for file in files:
        digest.update(f"{'' if file == path else file.name} {file.stat().st_size}\n".encode())
    configuration = path / "config.json"
    if configuration.is_file():
        digest.update(configuration.read_bytes())
    return digest.hexdigest()[:32]


class EngineHost:
    """The engine as API processes meet it."""

    def __init__(self, commands: EngineCommands, path: str, name: str, options: dict[str, Any]) -> None:
        self._commands = commands
        loop = commands.loop
        self._facts = model_facts(loop, path)
        self._vocabulary = vocabulary_of(loop.setup.tokenizer)
        self.model = model_digest(self._facts, self._vocabulary)
        self.name = name
        self.life = secrets.token_hex(8)
        self._options = options
        journal = loop.session_log.journal
        self._owning = None if journal is None else journal.owning
        self.journal = "" if self._owning is None else self._owning.identity
        """The journal that this engine shares with others; empty if it has one of its own."""

    @property
    def facts(self) -> wire.ModelFacts:
        """Facts about the model."""
        return self._facts

    def welcome(self, greeting: wire.Greeting) -> wire.Welcome | str:
        """The answer to a greeting, or why it is refused."""
        if greeting.protocol != wire.PROTOCOL:
            spoken = f"version {greeting.protocol} of the link, the engine {wire.PROTOCOL}"
            return f"the API process speaks {spoken}; install the same version of Holdfast for both"
        if greeting.model not in ("", self.model):
            models = f"model {greeting.model[:8]}, the engine has {self.model[:8]}"
            return f"the API process serves {models}; start all engines with the same model and tokenizer"
        if not 0 < greeting.calls < 1 << (63 - wire.CALL_BITS) or not greeting.client:
            return "the greeting has no name, or no valid prefix for its calls"
        about = (self.name, self.life, self.model, self._options)
        return wire.Welcome(wire.PROTOCOL, *about, self.journal)

    def introduction(self) -> list[wire.Report]:
        """What a new member is told."""
        told = [] if self.journal else stored_sessions(self._commands.loop)
        return [wire.Ready(self._facts, self._vocabulary, told), self._commands.pulse()]

    def pulse(self) -> wire.Pulse:
        """The engine's counters and gauges."""
        return self._commands.pulse()

    def untold(self) -> Iterator[wire.Elsewhere | None]:
        """The sessions that a new member is not told of in its introduction, in portions; None for none yet.

        Sessions in a shared journal are told once the journal has confirmed that they are this engine's: one
        that was cut off, or stopped, may have been declared dead meanwhile, and does not know.
        """
        loop, asked = self._commands.loop, time.monotonic()
        while self._owning is not None and self._owning.confirmed < asked:
            yield None
        names = list(loop.session_log.sessions) if self.journal else []
        for first in range(0, len(names), TOLD_AT_ONCE):
            some = (stored_session(loop, name) for name in names[first : first + TOLD_AT_ONCE])
            yield wire.Elsewhere([stored for stored in some if stored is not None])

    def stored(self, name: str) -> wire.StoredSession | None:
        """An open session with all that API processes keep of it."""
        return stored_session(self._commands.loop, name)

    def take(self, content: wire.Content, secure: SecureSocket) -> str | None:
        """Take a connection over that brings a file, or return why it is refused."""
        receiver = self._commands.receiver
        return "content for an engine without a disk" if receiver is None else receiver.take(content, secure)


class SharedWorker(Worker):
    """Joins the commands of an engine to all its API processes."""

    def __init__(
        self,
        peers: Peers,
        commands: EngineCommands,
        drain_seconds: float,
        sender: SnapshotSender | None = None,
    ) -> None:
        """`sender`: links to other engines, where they share a journal."""
        super().__init__(_NoSocket(peers), commands, parent=0)
        self.signals = 0
        self._peers = peers
        self._drain_seconds = drain_seconds
        self._drained = 0.0
        self._drain: Drain | None = None
        if commands.receiver is not None:
            self._others.append(commands.receiver.descriptor)
        claims = commands.verbs.claims
        if claims is not None and sender is not None:
            self._others.append(sender.descriptor)
            commands.hand_overs = HandOvers(commands.verbs, claims, sender)
            self._drain = Drain(commands.loop, claims, commands.hand_overs, sender)

    def signalled(self, *_: object) -> None:
        """A signal asks the process to end."""
        self.signals += 1

    def _serves(self) -> bool:
        """Whether the process goes on: while turns are in flight after the first signal, within a time."""
        if self.commands.drains:
            self.signals = max(1, self.signals)
        if not self.signals:
            return True
        if not self._peers.draining:
            self._peers.draining = True
            self._drained = time.monotonic() + self._drain_seconds
            log.info("draining", extra={"fields": {"turns": len(self.commands.turns)}})
            self._peers.send([msgspec.structs.replace(self.commands.pulse(), draining=True)])
            if self._drain is not None:
                self._drain.begin()
        busy = bool(self.commands.turns or self.backlog)
        if self._drain is not None:
            self._drain.poll()
            busy = busy or not self._drain.over
        return self.signals < 2 and bool(busy) and time.monotonic() < self._drained

    def _receive(self) -> tuple[wire.Command, int] | None:
        with self.commands.loop.times.measured("read"):
            return self._peers.receive()

    def _post(self, reports: list[wire.Report]) -> None:
        if self._peers.draining:
            reports = [
                msgspec.structs.replace(report, draining=True) if isinstance(report, wire.Pulse) else report
                for report in reports
            ]
        self._peers.send(reports)


class _NoSocket:
    """Waits for the peers; the shared worker sends and receives by itself."""

    def __init__(self, peers: Peers) -> None:
        self.wait = peers.wait

    def send(self, _frame: bytes) -> None:
        """Not used."""
        raise AssertionError("reports go to peers")

    def receive(self) -> bytes | None:
        """Not used."""
        raise AssertionError("commands come from peers")


def bind(address: str) -> socket.socket:
    """Bind first: an address in use is an error before the model is loaded. It does not listen yet."""
    host, port = split_address("listen", address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        known = errno.errorcode.get(error.errno or 0, "")
        raise OptionError("listen", f"{address} is not available: {error.strerror or known}") from error
    return bound


def reachable(host: str, port: int) -> str:
    """The address of a socket as others reach it: one that listens everywhere has the machine's name."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run(model: str, engine_options: dict[str, Any], options: EngineProcessOptions, progress: Progress) -> int:
    """Serve API processes until a signal; raises `OptionError` or what opening the model raises."""
    assert options.link_keys is not None, "the command requires it"
    context = server_context(options.link_keys)
    keys = Keys.read(ServerOptions(api_keys=options.api_keys))
    chosen = {"seal_seconds": SEAL_SECONDS, **engine_options, "tenant_shares": keys.shares}
    make_options(**chosen)
    set_up_logging(options.log_level, options.log_format, sys.stderr)
    warn_if_readable(options.link_keys)
    bound = bind(options.listen)
    path = model
    if model not in ECHO_MODELS:
        cache = engine_options.get("cache")
        path = str(resolve_model(model, lambda done, total: progress("fetch", done, total), cache))
    outbox = Outbox()
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    name = options.engine_id or f"{socket.gethostname()}:{port}"
    member = Membership(name, options.advertise or reachable(host, port), options.tenant_sessions)
    opened = make_options(**chosen)
    loop = open_loop(path, opened, progress, outbox, serve_early=True, member=member)
    seconds, receiver = options.link_seconds, None
    if loop.disk is not None:
        on_cpu = loop.setup.model.device.type == "cpu"
        receiver = SnapshotReceiver(
            loop.disk.staging, outbox.answer, seconds, competes=lambda: on_cpu and loop.active
        )
    commands = EngineCommands(loop, outbox, receiver)
    about = EngineHost(commands, path, name, without_credentials(engine_options))
    peers = Peers(bound, context, about, seconds)
    sender = SnapshotSender(client_context(options.link_keys), about.model) if about.journal else None
    worker = SharedWorker(peers, commands, options.drain_seconds, sender)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.signalled)
    bound_pauses()
    bound.listen(BACKLOG)
    _announce(about, shown)
    worker.run()
    if sender is not None:
        sender.close()
    if receiver is not None:
        receiver.close()
    loop.shut_down(lambda done, total: progress("spill", done, total), lambda: worker.signals > 2)
    loop.end_ranks()
    peers.close(FLUSH_SECONDS)
    return 0


def _announce(about: EngineHost, shown: str) -> None:
    """Print the address and the memory plan."""
    facts = about.facts
    what = f"{facts.architecture}, {facts.dtype} on {facts.device}, context {facts.context_length}"
    lines = [
        f"Holdfast engine {about.name} listens on {shown}",
        *(f"  {each}" for each in (what, *facts.plan)),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
