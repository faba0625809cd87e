"""The engine's loop: plan, run, settle, tell.

It joins the core's scheduler to an executor and keeps, for each turn in flight, the stream of what it says.
Whoever drives it calls `step` until there is nothing to do. An executor that raises does not end the loop:
the step is reported as failed, and the core takes its turns back.

The verbs of clients are here as well: they are the core's, and are written down. With a journal the end of a
turn is told, and `done` of a verb is called, once what happened is in the file: acknowledged means durable.
Records of a step are written beside the steps that follow. Without a journal everything is told at once.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

from holdfast.core.errors import RequestConflict, TooManySessions, TurnExists
from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Ledger
from holdfast.core.plan import StepResult
from holdfast.core.policy import Policy, Share
from holdfast.core.registry import Event, Plan
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.core.turn import KEEP_ALL, Turn, TurnRequest
from holdfast.engine.durable.journal import Journal
from holdfast.engine.durable.records import FinishedTurn
from holdfast.engine.durable.recovery import (
    UNKNOWN_TOKENS,
    bring_back,
    finished_turn,
    open_files,
    open_journal,
    read_journal,
)
from holdfast.engine.durable.session_log import Act, Book, require_text
from holdfast.engine.loop_times import LoopTimes
from holdfast.engine.memory_plan import MemoryPlan, disk_bytes, plan_memory
from holdfast.engine.options import EngineOptions, OptionError, tenant_parts
from holdfast.engine.sampling import Sampling
from holdfast.engine.step.executor import Executor, Flight, PlanRunner, require_device
from holdfast.engine.step.speculation import Speculator
from holdfast.engine.step.step_size import step_tokens
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tiers.disk import DiskTier, Hurry
from holdfast.models.generation import GenerationDefaults
from holdfast.models.model import Model, ModelDescription

log = logging.getLogger("holdfast.engine")

ENDS = frozenset({"finished", "aborted", "failed"})

SEALING_STEPS = 4
"""Steps in which the last tokens of finished turns are computed before the loop ends."""

MOVING_SECONDS = 10.0
"""How long memory on its way between tiers is waited for before the loop ends."""

DISK_SECONDS = 0.005
"""How long a step without work waits for the disk, or for a copy."""

JOURNAL_SECONDS = 0.005
"""How long a step without work waits for the journal."""

Listener = Callable[[Event], None]


def _unobserved(event: Event) -> None:
    """Events that are about no turn (a session closed, a finding) have no listener of their own."""


class EngineLoop:
    """One model, one core, one executor."""

    def __init__(
        self,
        model: ModelDescription,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        options: EngineOptions,
        make_executor: Callable[[EngineLoop], PlanRunner] | None = None,
        identity: str = "",
    ) -> None:
        """`identity` names the model's weights: memory that lies in files is good for the same ones only.

        Whoever only describes a model brings what carries its plans out.
        """
        self.model = model
        self._device = model.device
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.options = options
        self.memory_plan: MemoryPlan = plan_memory(model, options)
        policy = Policy(
            context_length=model.context_length,
            vocabulary=model.config.vocabulary,
            chunk_tokens=options.chunk_tokens,
            running_max=options.max_running,
            queue_max=options.max_queue,
            sessions_max=options.max_sessions,
            tenant_sessions_max=options.tenant_sessions or options.max_sessions,
            session_ttl=options.session_ttl,
            checkpoints=options.checkpoints,
            leave_history=options.leave_history,
            durable_turns=options.journal is not None,
            share=Share(**tenant_parts(options)),
            shares={
                tenant: Share(**{**tenant_parts(options), **parts})
                for tenant, parts in options.tenant_shares.items()
            },
        )
        ledger = Ledger(self.memory_plan.layout, self.memory_plan.sizes())
        self.disk: DiskTier | None = None
        guesses = options.speculate == "ngram"
        self.speculator = Speculator(lambda turn: self.stream_of(turn).sampling) if guesses else None
        self.scheduler = Scheduler(
            ledger, policy, self.speculator, strict=options.audit == "strict", on_disk=self._on_disk
        )
        self.times = LoopTimes()
        self.streams: dict[int, TurnStream] = {}
        self.listeners: dict[int, Listener] = {}
        self.observer: Listener = _unobserved
        self._pending: Flight | StepResult | None = None
        self._after: dict[int, list[Act]] = {}
        self._after_close: dict[str, list[Act]] = {}
        self._closing: dict[str, list[Act]] = {}
        self.book = Book(open_journal(options, tokenizer))
        # A CPU that computes a step has no time to plan the next one.
        self._overlap = model.device.type == "cuda" if options.overlap is None else options.overlap
        self.executor: PlanRunner
        if make_executor is not None:
            self.executor = make_executor(self)
        else:
            assert isinstance(model, Model), "only weights can be computed with"
            self.executor = executor = Executor(model, self.memory_plan, options.max_running, self.stream_of)
            if options.disk is not None:
                self.disk = self._open_disk(options.disk, identity, executor)
        if self.book.journal is not None:
            self._revive(self.book.journal)
        self.book.start()
        if self.disk is not None:
            self.disk.sweep()

    def _revive(self, journal: Journal) -> None:
        """Bring back every session of the journal, with its tokens; its memory comes with its next turn."""
        try:
            sessions = read_journal(journal)
        except OptionError:
            if self.disk is not None:
                self.disk.files.close()
            raise
        strange = False
        for stored in sessions:
            refusal = stored.unusable or bring_back(self.scheduler, stored, self.now())
            if not refusal:
                self.book.revived(stored)
                if self.disk is not None:
                    self.disk.welcome(stored)
                continue
            log.error("session %s stays in the journal: %s", stored.id, refusal)
            self.book.left_behind[stored.id] = refusal
            strange = strange or refusal.endswith(UNKNOWN_TOKENS)
            if self.disk is not None:
                self.disk.keep(stored)
        if not strange:
            journal.adopt_vocabulary()

    def _open_disk(self, directory: str, identity: str, executor: Executor) -> DiskTier:
        form = (self.options.page_size, self.memory_plan.layout, self.model.memory_shape, self.model.dtype)
        try:
            room, files = disk_bytes(self.options), open_files(directory)
        except OptionError:
            if self.book.journal is not None:
                self.book.journal.close()
            raise
        return DiskTier(
            files,
            room,
            self.options.snapshot_seconds,
            (self.scheduler, executor, self.book),
            (identity, hashlib.sha256(repr(form).encode()).hexdigest()),
            self.now,
        )

    def _on_disk(self, session: Session) -> bool:
        return self.disk is not None and self.disk.current(session)

    def stream_of(self, turn: Turn) -> TurnStream:
        """What a turn in flight says."""
        return self.streams[turn.number]

    # --- turns ------------------------------------------------------------------------------------

    def submit(
        self,
        session_id: str,
        request: TurnRequest,
        sampling: Sampling,
        listener: Listener,
        fingerprint: str | None = None,
    ) -> tuple[Turn, TurnStream]:
        """Queue a turn on a session; `listener` hears its events until it ends.

        With a `fingerprint` of what was asked, the turn's id is its idempotency key: see `replay`.
        """
        require_text(turn_id=request.turn_id, fingerprint=fingerprint)
        sampling.check_vocabulary(self.model.config.vocabulary)
        self.book.require_journal()
        if fingerprint is not None and self.book.replay(session_id, request.turn_id, fingerprint) is not None:
            raise TurnExists(f"turn {request.turn_id} of session {session_id} has finished already")
        turn = self.scheduler.submit(session_id, request, self.now())
        stream = self._attend(turn, sampling, listener)
        stream.fingerprint = fingerprint
        return turn, stream

    def tokens_max(self, tenant: str) -> int:
        """The longest sequence that a tenant may have: within the context, and within what it may hold."""
        ledger = self.scheduler.registry.ledger
        if not ledger.layout.full:
            return self.model.context_length
        pages = ledger.account(tenant).limits[ledger.pool(Component.FULL).index]
        return min(self.model.context_length, pages * ledger.layout.page_size)

    def request(
        self, tenant: str, request: TurnRequest, sampling: Sampling, listener: Listener
    ) -> tuple[Turn, TurnStream]:
        """Queue a request of its own."""
        sampling.check_vocabulary(self.model.config.vocabulary)
        turn = self.scheduler.request(tenant, request, self.now())
        return turn, self._attend(turn, sampling, listener)

    def _attend(self, turn: Turn, sampling: Sampling, listener: Listener) -> TurnStream:
        tokens = self.scheduler.registry.sessions[turn.session_id].sequence.tokens
        known = len(tokens)
        # A running turn's history is never cut, so that it can be read at any time until the turn ends.
        stream = TurnStream(
            self.tokenizer,
            sampling,
            self.defaults.eos_tokens or self.tokenizer.eos_tokens,
            read_prompt=lambda: [*tokens.slice(0, known), *turn.request.tokens],
            input_first=known,
        )
        self.streams[turn.number] = stream
        self.listeners[turn.number] = listener
        return stream

    def replay(self, session_id: str, turn_id: str, fingerprint: str) -> FinishedTurn | None:
        """How a turn that was submitted with this fingerprint ended; None if no such turn has.

        The same id with another fingerprint is a `TurnConflict`.
        """
        return self.book.replay(session_id, turn_id, fingerprint)

    # --- sessions ---------------------------------------------------------------------------------

    def open_session(
        self,
        session_id: str,
        tenant: str,
        ttl: float | None = None,
        metadata: dict[str, object] | None = None,
        system: str | None = None,
        done: Act | None = None,
    ) -> Session:
        """Open a session; `done` is called when that is durable. Refusals change nothing."""
        require_text(id=session_id, tenant=tenant, system=system)
        now = self._catch_up()
        self.book.require_journal()
        self.book.require_free(session_id)
        ttl = None if ttl is None else float(ttl)
        session = self.scheduler.open(session_id, tenant, now, ttl)
        self.book.opened(session_id, tenant, ttl, metadata, system)
        self._acknowledge(done)
        return session

    def close_session(self, session_id: str, done: Act | None = None) -> None:
        """Close a session; a turn in flight is rolled back first. `done` when that is durable."""
        self.book.require_journal()
        asked = [] if done is None else [done]
        if session_id not in self.scheduler.registry.sessions and session_id in self._closing:
            self._closing[session_id] += asked
            return
        self.scheduler.close(session_id, self.now())
        self._after_close.setdefault(session_id, []).extend(asked)
        self.tell(self.scheduler.take_events())

    def interrupt(
        self,
        session_id: str,
        keep: int | None = KEEP_ALL,
        turn_id: str | None = None,
        request_id: str | None = None,
        done: Act | None = None,
    ) -> None:
        """End the turn in flight, or cut the last finished one if no other has begun.

        `keep` is how many generated tokens stay: `KEEP_ALL`, a number, or None for nothing of the turn. One
        in flight stops whatever the journal's state; `done` is called when what became of it is durable.
        """
        require_text(turn_id=turn_id, request_id=request_id)
        now = self._catch_up()
        session = self.scheduler.registry.find(session_id)
        turn = session.turn
        if turn is None:
            self.book.require_journal()
        asked = f"interrupt {turn_id} {keep}"
        if self.book.answered(session_id, request_id, asked) is not None:
            self._acknowledge(done)
            return
        self.scheduler.interrupt(session_id, now, keep, turn_id)
        self._note_named(session)
        self.book.requested(session_id, request_id, asked)
        if turn is None:
            if keep != KEEP_ALL:
                self._note_cut(session, keep)
            self._acknowledge(done)
        elif done is not None:
            self._after.setdefault(turn.number, []).append(done)
        self.tell(self.scheduler.take_events())

    def rewind(
        self, session_id: str, turns: int, request_id: str | None = None, done: Act | None = None
    ) -> None:
        """Go back to the end of turn `turns`: that many remain."""
        require_text(request_id=request_id)
        now = self._catch_up()
        self.book.require_journal()
        asked = f"rewind {turns}"
        if self.book.answered(session_id, request_id, asked) is None:
            session = self.scheduler.registry.find(session_id)
            before = len(session.boundaries)
            self.scheduler.rewind(session_id, turns, now)
            self._note_named(session)
            if turns < before:
                self._note_cut(session, None)
            self.book.requested(session_id, request_id, asked)
        self._acknowledge(done)

    def fork(
        self,
        session_id: str,
        new_id: str,
        turns: int | None = None,
        request_id: str | None = None,
        done: Act | None = None,
        anew: bool = True,
    ) -> Session:
        """A new session that goes on from the end of an earlier turn, or of the last.

        A fork that is asked for again by its `request_id` answers the session that it made the first time; it
        is refused if that one is closed since, rather than to make another. Without `anew` it makes none.
        """
        require_text(id=new_id, request_id=request_id)
        now = self._catch_up()
        self.book.require_journal()
        asked = f"fork {turns}"
        made = self.book.answered(session_id, request_id, asked)
        if made is None:
            if not anew:
                raise TooManySessions("this key may have no more sessions open")
            self.book.require_free(new_id)
            parent = self.scheduler.registry.find(session_id)
            child = self.scheduler.fork(session_id, new_id, now, turns)
            self._note_named(parent)
            self.book.forked(new_id, session_id, len(child.boundaries))
            self.book.requested(session_id, request_id, asked, new_id)
        elif made in self.book.sessions:
            child = self.scheduler.registry.find(made)
        else:
            raise RequestConflict(f"request {request_id} made session {made}, which is closed since")
        self._acknowledge(done)
        return child

    def spill(self, session_id: str, tier: Tier | None = None) -> bool:
        """Start moving an idle session's memory to another tier, by default the nearest; whether it began."""
        return self.scheduler.spill(session_id, self.now(), tier)

    def restore(self, session_id: str) -> bool:
        """Start bringing an idle session's memory back to the device; whether it began."""
        return self.scheduler.restore(session_id, self.now())

    def _catch_up(self) -> float:
        """The time, after all that was due by then: what came first is also in the journal first."""
        now = self.now()
        self.scheduler.tick(now)
        self.tell(self.scheduler.take_events())
        return now

    def _note_named(self, session: Session) -> None:
        """A session that was opened on the core itself is in the book from its first change on."""
        if session.id not in self.book.sessions and not session.one_shot:
            self.book.opened(session.id, session.tenant, session.ttl)

    def _note_cut(self, session: Session, kept: int | None) -> None:
        self.book.cut(session.id, len(session.boundaries), kept)
        if self.disk is not None:
            self.disk.cut(session)

    def _acknowledge(self, done: Act | None) -> None:
        if done is not None:
            self.book.when_durable(done)

    # --- steps ------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is anything to plan, run, settle or write."""
        return self.active or self.book.waits

    @property
    def active(self) -> bool:
        """Whether a step has anything to do. What is handed over to be written needs none."""
        registry = self.scheduler.registry
        return bool(
            registry.running
            or registry.queue
            or registry.flights
            or registry.transits
            or registry.seals
            or (self.disk is not None and self.disk.busy)
        )

    def step(self) -> None:
        """One step: make a plan and launch it, settle what is due, and tell who listens.

        With overlap the plan launched before is settled now, while this one runs; without, this one is.
        """
        scheduler = self.scheduler
        if self.disk is not None:
            with self.times.measured("disk"):
                self.disk.collect()
        for number, arrived in self.executor.carrier.arrived().items():
            scheduler.arrive(number, arrived, self.now())
        with self.times.measured("plan"):
            plan = scheduler.plan(self._budget(), self.now())
        self._rest(plan)
        launched = self._launch(plan)
        if self._pending is not None:
            self._settle(self._pending)
        self._pending = launched
        if not self._overlap or not plan.rows or isinstance(launched, StepResult):
            self._settle(launched)
            self._pending = None
        self.tell(scheduler.take_events())
        with self.times.measured("journal"):
            self.book.flush()
        if self.disk is not None:
            with self.times.measured("disk"):
                self.disk.tend()

    def _budget(self) -> int:
        """How many tokens the next step may have. Guesses want room: with them all steps may be large."""
        registry, most = self.scheduler.registry, self.options.step_tokens
        if self.speculator is not None:
            return most
        return step_tokens(registry, self.executor.small_step(len(registry.running)), most)

    def _rest(self, plan: Plan) -> None:
        """A step without work waits a moment for a copy, the disk or the journal, rather than to spin."""
        if plan or self._pending is not None:
            return
        self.executor.carrier.wait(DISK_SECONDS)
        if self.disk is not None:
            self.disk.wait(DISK_SECONDS)
        self.book.wait(JOURNAL_SECONDS)

    def _launch(self, plan: Plan) -> Flight | StepResult:
        """Start a step, after the copies that nobody wants. What it raises fails the step, not the engine."""
        try:
            self.executor.carrier.forsake(self.scheduler.registry.transits)
            if self.disk is not None:
                self.disk.launch(plan)
            return self.executor.start(plan)
        except Exception as error:  # noqa: BLE001
            return self._failure(plan, error)

    def _settle(self, launched: Flight | StepResult) -> None:
        """Settle the oldest plan in flight with what was launched for it."""
        plan = self.scheduler.registry.flights[0]
        if plan.void:
            result = StepResult([], error="discarded")
        elif isinstance(launched, StepResult):
            result = launched
        else:
            try:
                result = self.executor.finish(launched)
            except Exception as error:  # noqa: BLE001
                result = self._failure(plan, error)
        if self.disk is not None and plan.moves:
            result.moved = self.disk.moved(plan, result.moved)
        self.tell(self.scheduler.settle(plan, result, self.now()))

    def _failure(self, plan: Plan, error: Exception) -> StepResult:
        log.error("step %d failed", plan.step, exc_info=error)
        require_device(self._device)
        return StepResult([], error=f"the executor failed: {type(error).__name__}")

    def tell(self, events: list[Event]) -> None:
        """Pass events on to those who listen; what must be durable first is told when it is."""
        for event in events:
            if event.turn is None:
                self._tell_of_session(event)
            elif event.kind in ENDS:
                self._tell_end(event, event.turn)
            else:
                listener = self.listeners.get(event.turn.number)
                if listener is not None:
                    listener(event)

    def _tell_of_session(self, event: Event) -> None:
        if event.kind == "finding":
            log.error("audit: %s", event.reason)
        if event.kind != "closed":
            self.observer(event)
            return
        if event.session_id in self.book.sessions:
            self.book.closed(event.session_id, event.reason)
        # Another session of this name may be opened and closed before this one's end is durable.
        after = self._closing[event.session_id] = self._after_close.pop(event.session_id, [])

        def told() -> None:
            if self._closing.get(event.session_id) is after:
                del self._closing[event.session_id]
            if self.disk is not None:
                self.disk.forget(event.session_id)
            self.observer(event)
            for done in after:
                done()

        self.book.when_durable(told)

    def _tell_end(self, event: Event, turn: Turn) -> None:
        """A turn is over. One that stands is written down first; one that never was waits for nothing."""
        self.executor.release(turn)
        if self.speculator is not None:
            self.speculator.release(turn)
        stream = self.streams.pop(turn.number, None)
        listener = self.listeners.pop(turn.number, None)
        session = self.scheduler.registry.sessions.get(event.session_id)
        stands = session is not None and session.last is turn and not session.one_shot

        def told() -> None:
            if listener is not None:
                listener(event)
            for done in self._after.pop(turn.number, []):
                done()
            if session is not None and stands and session.last in (turn, None):
                self.scheduler.durable(event.session_id)

        if session is None or not stands:
            told()
            return
        self._note_named(session)
        if stream is not None:
            stream.end()
        self.book.ended(session.id, turn.request.tokens, finished_turn(event, session, turn, stream))
        self.book.when_durable(told)

    def shut_down(
        self,
        progress: Callable[[int, int], None] | None = None,
        hurried: Callable[[], bool] | None = None,
    ) -> None:
        """Write every session's memory to disk and what is left to the journal, and let go of both.

        The sessions come back with the next loop. Turns in flight should be over: one that is not, never was.
        Once `hurried` says so, no more memory is written: what is not in a file is computed again.
        """
        hurry = Hurry(hurried)
        registry = self.scheduler.registry
        for _ in range(SEALING_STEPS):
            if registry.seals or registry.flights:
                self.step()
        deadline = self.now() + MOVING_SECONDS
        while registry.transits and self.now() < deadline and not hurry():
            self.step()
        if self.disk is not None:
            if self.book.journal is not None:
                self.disk.write_all(progress if progress is not None else _unwatched, hurry)
            self.book.settle()
            self.disk.close(hurry)
            self.disk = None
        self.book.close()
        self.executor.carrier.drain()

    def now(self) -> float:
        """Seconds on a clock that never jumps."""
        return time.monotonic()


def _unwatched(done: int, total: int) -> None:
    """Nobody watches."""
