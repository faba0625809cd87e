"""The engine process: one model, one loop, one socket to the API process.

The supervisor starts it as `python -m holdfast.server.link.worker SOCKET PARENT`. The first message is the
configuration; after that it reads commands, makes steps while there is work, and sends reports. Its work
between two steps is bounded (`rounds.py`). Without work it captures the CUDA graphs that are left, one
between two looks for commands, sleeps until a command comes, lets idle sessions expire, and audits all memory
once. It ends at a `Stop`, or when its parent has died: turns in flight are rolled back, and sessions are
written to disk, until a second `Stop` cuts that short.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # A terminal sends it to the whole process group, also while the imports below take their seconds.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import logging
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO

from holdfast.engine.draft.reporting import draft_lines
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.pauses import bound_pauses, collect_when_idle
from holdfast.engine.sampling import CHECKPOINT_FIELDS
from holdfast.engine.start.pull import PullError
from holdfast.engine.start.startup import open_loop
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.models.fields import ConfigurationError
from holdfast.server.link import wire
from holdfast.server.link.commands import EngineCommands
from holdfast.server.link.frames import FrameSocket
from holdfast.server.link.results import Outbox, stored_session
from holdfast.server.link.rounds import (
    BUDGET_SECONDS,
    READ_BYTES_MAX,
    READ_MAX,
    UNHURRIED_SECONDS,
    Backlog,
    Budget,
)
from holdfast.server.telemetry.logs import set_up_logging

log = logging.getLogger("holdfast.engine")

PULSE_SECONDS = 1.0
SEAL_SECONDS = 0.02
"""How long the last token of a turn is left to the session's next turn: many clients ask for it at once, and
a step that computes the token alone would hold it up."""

SLACK_SECONDS, SPUN_SLACK_SECONDS = 0.001, 0.0002
"""A shorter slack is not waited for: a poll counts in milliseconds, and a processor that looks all the time
needs some microseconds for a command."""

SPIN_SECONDS = 0.02
"""How long after the last step a processor beside a GPU looks for commands all the time."""

NAP_SECONDS = 0.1
WAITING_SECONDS = 0.001
"""How long to wait for commands while verbs wait for the journal, or turns for their grammars; both wake this
process themselves.
"""

QUIET_SECONDS = 1.0
"""Idle time before the audit."""

AUDIT_UNITS = 4096
"""Units that one slice of the audit looks at: a fraction of a millisecond."""

WHOLE_HOLDS_MAX = 512
"""Maximum number of Holds for an audit in one go."""

FLUSH_SECONDS = 2.0
ALONE_SECONDS = 1.0
"""How often a process without a configuration checks that its parent is alive."""


class Awaited(Protocol):
    """Where commands come from. Only `wait` waits."""

    def wait(self, seconds: float, others: Iterable[int] = ()) -> bool:
        """Wait for a frame, or for news on other descriptors; whether any came."""


class CommandSocket(Awaited, Protocol):
    """The engine process's end of the socket to the API process."""

    def send(self, frame: bytes, /) -> None:
        """Send a frame."""

    def receive(self) -> bytes | None:
        """The next frame that has come, or None."""


class Worker:
    """Joins the commands of an engine to their socket."""

    def __init__(
        self,
        socket: CommandSocket,
        commands: EngineCommands,
        parent: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` measures the budget of a round."""
        self.socket = socket
        self.commands = commands
        self.parent = parent
        self.stopping = False
        self.backlog = Backlog(commands.session_of)
        self._clock = clock
        self._others = _descriptors(commands.loop)
        self._spins = commands.loop.setup.model.device.type == "cuda"
        self._slack_least = SPUN_SLACK_SECONDS if self._spins else SLACK_SECONDS
        self._pulsed = 0.0
        self._counted = 0
        self._worked = 0.0
        self._auditing = False
        self._recounting = False

    def run(self) -> None:
        """Serve until a `Stop` comes or the parent dies."""
        loop, commands, times = self.commands.loop, self.commands, self.commands.loop.times
        while self._serves():
            self._read(self._patience())
            spent = self._budget()
            loop.flush_journal()  # Acknowledges what is durable, before commands that depend on it.
            self._carry_out(spent)
            with times.measured("waiting"):
                commands.retry(spent)
            if commands.reporting:
                with times.measured("report"):
                    commands.report(spent)
            loop.flush_journal()
            self._send()  # Answers and ends are sent before a step, which may take long.
            times.end_round()
            if loop.active and loop.pacing.slack >= self._slack_least:
                pass  # Commands that come now are in time for the next plan.
            elif loop.active:
                loop.step()
                self._worked = time.monotonic()
                self._auditing = self._recounting = False
            else:
                self._idle()
            self._send()
        self._roll_back()

    def _serves(self) -> bool:
        """Whether the process goes on."""
        return not self.stopping and os.getppid() == self.parent

    def _patience(self) -> float:
        """How long to wait for a command, the journal or a grammar: while a plan is due, not at all."""
        commands = self.commands
        if commands.reporting or self.backlog or self._auditing:
            return 0.0
        if commands.loop.scheduler.registry.overdue:
            return 0.0
        if commands.loop.capturing.remaining and not commands.loop.active:
            return 0.0
        if commands.loop.active:
            return max(0.0, commands.loop.pacing.slack)
        if commands.waits:
            sleeps = commands.loop.session_log.writing or commands.compiles or commands.moves
            return WAITING_SECONDS if sleeps else 0.0
        if commands.moves:
            return WAITING_SECONDS
        return SEAL_SECONDS if commands.loop.scheduler.registry.seals else NAP_SECONDS

    def _budget(self) -> Budget:
        """The budget of a round."""
        running = self.commands.loop.scheduler.registry.running
        return Budget(BUDGET_SECONDS if running else UNHURRIED_SECONDS, self._clock)

    def _read(self, seconds: float) -> None:
        """Read the commands that have come; wait for one, for the journal, or for a grammar."""
        if seconds and not self._await(seconds):
            return
        read = 0
        for _ in range(READ_MAX):
            received = self._receive()
            if received is None:
                return
            command, size = received
            if isinstance(command, wire.Stop):
                self.stopping = True
                return
            self.backlog.add(command)
            read += size
            if read >= READ_BYTES_MAX:
                return

    def _receive(self) -> tuple[wire.Command, int] | None:
        """The next command that has come, and its size in bytes."""
        frame = self.socket.receive()
        if frame is None:
            return None
        with self.commands.loop.times.measured("read"):
            return wire.decode_command(frame), len(frame)

    def _await(self, seconds: float) -> bool:
        """Wait for a command, the journal or a grammar; whether one came.

        Beside a GPU the processor looks all the time until the engine has rested for a while: a sleeping
        process takes a tenth of a millisecond to wake up, and wakes up at whole milliseconds.
        """
        if not self._spins:
            return self.socket.wait(seconds, self._others)
        end = time.monotonic() + seconds
        until = end if self.commands.loop.active else min(end, self._worked + SPIN_SECONDS)
        while time.monotonic() < until:
            if self.socket.wait(0.0, self._others):
                return True
        left = end - time.monotonic()
        return left > 0 and self.socket.wait(left, self._others)

    def _carry_out(self, spent: Budget) -> None:
        """Carry out commands, one at least, until the budget is spent."""
        while self.backlog:
            command = self.backlog.take()
            with self.commands.loop.times.measured(str(command.__struct_config__.tag)):
                self.commands.receive(command)
            if spent():
                return

    def _idle(self) -> None:
        """Let idle sessions expire; capture a graph, or audit the memory after work, a slice at a time."""
        loop = self.commands.loop
        with loop.times.measured("tick"):
            loop.scheduler.tick(loop.now())
            loop.dispatcher.tell()
        ledger = loop.scheduler.registry.ledger
        if loop.scheduler.registry.copies or any(pool.retiring for pool in ledger.pools.values()):
            loop.step()  # For copies of forks and cuts, and for units that a step has to free.
        if loop.capturing.remaining:
            with loop.times.measured("capture"):
                loop.capturing.when_idle()
            return
        quiet = time.monotonic() - self._worked > QUIET_SECONDS
        if quiet:
            collect_when_idle()
        if quiet and ledger.settled != self._counted:
            with loop.times.measured("audit"):
                self._recount()
                loop.dispatcher.tell()

    def _recount(self) -> None:
        """One slice of an audit that began after the last work, or all of it if that is quick."""
        scheduler = self.commands.loop.scheduler
        ledger = scheduler.registry.ledger
        if len(ledger.live) <= WHOLE_HOLDS_MAX:
            scheduler.recount()
            whole = True
        else:
            self._recounting = self._recounting or scheduler.audit.between_rounds
            whole = scheduler.recount_some(AUDIT_UNITS) and self._recounting
        self._auditing = not whole
        if whole:
            self._counted, self._recounting = ledger.settled, False

    def _send(self) -> None:
        reports = self.commands.take_reports()
        now = time.monotonic()
        if now - self._pulsed >= PULSE_SECONDS:
            self._pulsed = now
            reports.append(self.commands.pulse())
        if reports:
            with self.commands.loop.times.measured("send"):
                self._post(reports)

    def _post(self, reports: list[wire.Report]) -> None:
        """Send reports to the API process."""
        for report in reports:
            self.socket.send(wire.encode(report))

    def _roll_back(self) -> None:
        """Roll back turns in flight before the process ends."""
        for call in list(self.commands.turns):
            self.commands.receive(wire.EndTurn(call, None, "the server is stopping"))
        deadline = time.monotonic() + FLUSH_SECONDS
        while self.commands.turns and self.commands.loop.busy and time.monotonic() < deadline:
            self.commands.loop.step()
        self._send()


def _descriptors(loop: EngineLoop) -> list[int]:
    """What wakes the process besides commands: the journal, and grammars that are compiled."""
    grammars, journal = loop.setup.grammars, loop.session_log.descriptor
    return [*([grammars.descriptor] if grammars.available else []), *([] if journal is None else [journal])]


def told_to_hurry(socket: CommandSocket) -> bool:
    """Whether a second `Stop` has come; other commands are discarded."""
    while (frame := socket.receive()) is not None:
        command = wire.decode_command(frame)
        if isinstance(command, wire.Stop) and command.at_once:
            return True
    return False


def model_facts(loop: EngineLoop, path: str) -> wire.ModelFacts:
    """What the API process needs to know about the model."""
    setup = loop.setup
    model, defaults = setup.model, setup.defaults
    computed = f"{path} {model.dtype} {setup.memory_plan.types}".strip()
    return wire.ModelFacts(
        path=path,
        architecture=model.config.architecture,
        vocabulary=model.config.vocabulary,
        context_length=model.context_length,
        tokens_max=setup.memory_plan.tokens_max,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        defaults={name: getattr(defaults, name) for name in CHECKPOINT_FIELDS},
        eos_tokens=list(setup.end_tokens),
        plan=[
            *setup.memory_plan.lines(),
            *draft_lines(loop.drafts),
            *graph_lines(loop),
            *rank_lines(loop),
        ],
        fingerprint=f"hf-{zlib.crc32(computed.encode()):08x}",
        constrains=setup.grammars.available,
        calls=setup.formats.calls,
        reasoning=setup.formats.reasoning,
    )


def graph_lines(loop: EngineLoop) -> list[str]:
    """What is to be said of CUDA graphs at the start; nothing on a CPU."""
    graphs = loop.executor.graphs
    if graphs is not None:
        rest = "; the others follow while it serves" if graphs.remaining else ""
        return [f"{graphs.captured} of {graphs.total} CUDA graphs captured{rest}"]
    return ["no CUDA graphs: fast-start"] if loop.setup.model.device.type == "cuda" else []


def rank_lines(loop: EngineLoop) -> list[str]:
    """What is to be said of tensor parallelism at the start."""
    ranks = loop.setup.options.tensor_parallel
    return [f"divided over {ranks} processes; pools are those of each"] if ranks > 1 else []


def vocabulary_of(tokenizer: Tokenizer) -> wire.Vocabulary:
    """The tokenizer in the form from which the API process builds it."""
    template = None if tokenizer.template is None else tokenizer.template.source
    return wire.Vocabulary(
        tokenizer.written(),
        template,
        tokenizer.names,
        list(tokenizer.eos_tokens),
        tokenizer.response_template_source,
    )


def stored_sessions(loop: EngineLoop) -> list[wire.StoredSession]:
    """All open sessions; at the start, those that were recovered from the journal."""
    names = list(loop.session_log.sessions)
    return [stored for name in names if (stored := stored_session(loop, name)) is not None]


def start(socket: CommandSocket, configure: wire.Configure, outbox: Outbox) -> EngineLoop | None:
    """Load the model, reporting progress; None if that fails."""
    told = 0.0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if done >= total or now - told > 0.05:
            told = now
            socket.send(wire.encode(wire.Progress(stage, done, total)))

    try:
        options = make_options(**{"seal_seconds": SEAL_SECONDS, **configure.options})
        return open_loop(configure.model, options, progress, outbox, serve_early=True)
    except OptionError as error:
        why, model = error.typed, False
    except (PullError, ConfigurationError) as error:
        why, model = str(error), isinstance(error, ConfigurationError)
    socket.send(wire.encode(wire.Unable(" ".join(why.split()), model)))
    return None


def main(path: str, parent: int, errors: TextIO = sys.stderr) -> int:
    """Run the engine process on a socket, as long as its parent lives."""
    # A terminal sends both signals to the whole process group; the API process decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    socket = FrameSocket.connect(path)
    try:
        while (frame := socket.receive()) is None:
            if os.getppid() != parent:
                return 1
            socket.wait(ALONE_SECONDS)
        configure = wire.decode_command(frame)
        assert isinstance(configure, wire.Configure), "the first message is the configuration"
        set_up_logging(configure.log_level, configure.log_format, errors)
        outbox = Outbox()
        loop = start(socket, configure, outbox)
        if loop is None:
            return 2
        commands = EngineCommands(loop, outbox)
        bound_pauses()
        facts = model_facts(loop, configure.model)
        socket.send(
            wire.encode(wire.Ready(facts, vocabulary_of(loop.setup.tokenizer), stored_sessions(loop)))
        )
        Worker(socket, commands, parent).run()
        loop.shut_down(
            lambda done, total: socket.send(wire.encode(wire.Progress("spill", done, total))),
            lambda: told_to_hurry(socket),
        )
        loop.end_ranks()
        return 0
    finally:
        socket.close(FLUSH_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
