"""The verbs of clients, each written once: wait, act on the core, write the journal, acknowledge.

    open  submit  abort  hear  interrupt  rewind  compact  fork  update  spill  restore  close

Used by `engine.Session` in this process and by the engine process behind the server (`server.link.commands`).
A verb that cannot act yet waits for its session (`waiting`) until a `retry` between two steps; a turn also
waits until its grammar is compiled. A verb is acknowledged to its `Reply` when its records are durable;
without a journal, at once. A verb that is refused has changed nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence

from holdfast.core.errors import Refused, RequestConflict, SessionMoved, TooManySessions, UnknownSession
from holdfast.core.layout import Tier
from holdfast.core.session import Session
from holdfast.core.tokens import pack
from holdfast.core.turn import KEEP_ALL
from holdfast.engine.acknowledgements import Acknowledgements
from holdfast.engine.claims import SessionClaims
from holdfast.engine.constraints.compiler import Compilation, State
from holdfast.engine.constraints.errors import GrammarError
from holdfast.engine.durable.session_log import Tools, Waiter, require_text
from holdfast.engine.grammars import GrammarRefused
from holdfast.engine.listeners import Refusing, Reply, TurnListener
from holdfast.engine.listening import Ahead
from holdfast.engine.loop import EngineLoop
from holdfast.engine.replacement import replacement
from holdfast.engine.sampling import SamplingError
from holdfast.engine.session_settings import DEFAULT_SETTINGS, SettingsChange, check_change
from holdfast.engine.steering import Steering
from holdfast.engine.turn_beginner import TurnBeginner
from holdfast.engine.turn_spec import HistoryChanged, HistoryRepeated, TurnSpec
from holdfast.engine.waiting import (
    Length,
    MemoryWait,
    SessionQueues,
    TurnWait,
    end_of_turn,
    kept_of_turn,
    never_spent,
    no_memory,
    turn_before,
)

__all__ = ["Verbs", "never_spent"]

log = logging.getLogger("holdfast.engine")


class Verbs:
    """The verbs on the sessions of one engine."""

    __slots__ = (
        "_ahead",
        "_dispatcher",
        "_grammars",
        "_patient",
        "_queues",
        "_requests",
        "_scheduler",
        "_session_log",
        "_steering",
        "_told",
        "_turns",
        "_waiting",
        "claims",
        "loop",
    )

    def __init__(self, loop: EngineLoop, patient: bool = False) -> None:
        """With `patient`, a turn on a busy session waits a step for the abort of the turn before it."""
        self.loop = loop
        self._scheduler = loop.scheduler
        self._session_log = loop.session_log
        self._dispatcher = loop.dispatcher
        self._ahead = Ahead(loop)
        self._turns = TurnBeginner(loop, self._ahead)
        self._steering = Steering(loop, self._turns, self._note_cut)
        self._grammars = loop.setup.grammars
        self._patient = patient
        self._queues = SessionQueues(lambda name: turn_before(loop.scheduler, name) is not None)
        self._requests = SessionQueues(lambda _: False)
        """Requests of their own that wait for their grammar, by the ids of their turns."""
        self._waiting: set[TurnListener] = set()
        """Turns that wait for their session, or for their grammar."""
        journal = loop.session_log.journal
        owning = None if journal is None else journal.owning
        self.claims = None if owning is None else SessionClaims(loop, owning)
        """Sessions that are taken over from other engines, where the journal is shared with them."""
        self._told = Acknowledgements(loop.session_log, self.claims)

    # --- waiting ----------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether a verb or a turn waits for its session, or a turn for its grammar."""
        return bool(self._queues or self._requests)

    @property
    def compiles(self) -> bool:
        """Whether a grammar is being compiled: its descriptor tells the end of that."""
        return self._grammars.pending

    def retry(self, spent: Callable[[], bool] = never_spent) -> None:
        """Try some of what waits, until `spent`."""
        if self.claims is not None:
            self.claims.poll()
        if self._grammars.pending:
            self._grammars.poll()
        if self._requests:
            self._requests.retry(spent)
            self._dispatcher.tell()
        if self._queues:
            self._queues.retry(spent)
            self._dispatcher.tell()

    def rest(self, seconds: float) -> None:
        """Wait for a grammar where a turn waits for one and the loop has nothing to do."""
        if self.waits and not self.loop.active:
            self._grammars.wait(seconds)

    def _when_ready(
        self,
        reply: Reply,
        session_id: str,
        act: Callable[[], None],
        length: Length = no_memory,
        forks: bool = False,
    ) -> None:
        """Act now, or as soon as that drops no memory that the verb could keep.

        Verbs act in the order in which they came, and later turns on the session wait for them. A turn that
        waits for another to end is no reason to wait: the verb may be what ends that one.
        """
        wait = MemoryWait(self._scheduler, session_id, length, forks)

        def attempt() -> bool:
            # What was not committed was not said: it gives way to every verb.
            if self._dispatcher.is_shedding(session_id):
                return False
            if not (self._ahead.stop(session_id) and wait.over(self.loop.now())):
                return False
            with Refusing(reply):
                self._require_same(session_id, wait.session)
                act()
            return True

        self._queues.add_verb(session_id, attempt)
        self._dispatcher.tell()

    def when_free(self, session_id: str, attempt: Callable[[], bool]) -> None:
        """Try something on a session until it succeeds; verbs and turns that come later wait for it."""

        def guarded() -> bool:
            if self._dispatcher.is_shedding(session_id) or not self._ahead.stop(session_id):
                return False
            return attempt()

        self._queues.add_verb(session_id, guarded)
        self._dispatcher.tell()

    def _require_same(self, session_id: str, meant: Session | None) -> None:
        """Refuse to act on another session than the one that had the name when the verb came."""
        found = self._scheduler.registry.sessions.get(session_id)
        if found is not None and found is not meant:
            raise UnknownSession(f"session {session_id} was closed; its name is in use again")

    # --- sessions ---------------------------------------------------------------------------------

    def open(
        self,
        reply: Reply,
        session_id: str,
        tenant: str,
        ttl: float | None = None,
        metadata: dict[str, object] | None = None,
        system: str | None = None,
        tools: Tools | None = None,
        settings: SettingsChange | None = None,
    ) -> None:
        """Open a session."""
        about = (session_id, tenant, ttl, metadata, system, tools, settings)
        if self.claims is not None and self.claims.when_settled(session_id, lambda: self.open(reply, *about)):
            return
        with Refusing(reply):
            require_text(id=session_id, tenant=tenant, system=system)
            check_change({"ttl": ttl, **(settings or {})})
            chosen = DEFAULT_SETTINGS.changed(settings or {})
            now = self._catch_up()
            self._session_log.require_writable()
            self._session_log.require_unused(session_id)
            seconds = None if ttl is None else float(ttl)
            self._scheduler.open(session_id, tenant, now, chosen.retention(seconds))
            self._session_log.opened(session_id, tenant, seconds, metadata, system, tools, chosen)
            self._told.when_made(reply, session_id, tenant)
        self._dispatcher.tell()

    def close(self, reply: Reply, session_id: str) -> None:
        """Close a session; a turn in flight is rolled back first. Waits for nothing."""
        waiter = Waiter(lambda: reply.done(None), lambda: reply.refused(SessionMoved(session_id)))
        with Refusing(reply):
            self._session_log.require_writable()
            if not self._dispatcher.join_close(session_id, waiter):
                self._scheduler.close(session_id, self.loop.now())
                self._dispatcher.when_closed(session_id, waiter)
        self._dispatcher.tell()

    def interrupt(
        self,
        reply: Reply,
        session_id: str,
        keep: int | None = KEEP_ALL,
        turn_id: str | None = None,
        request_id: str | None = None,
    ) -> None:
        """End the turn in flight, or cut the last finished one if no other has begun.

        `keep` is how many generated tokens stay: `KEEP_ALL`, a number, or None to roll the turn back. A turn
        in flight stops even if the journal cannot be written; it is acknowledged when its end is durable.
        """

        def act() -> None:
            require_text(turn_id=turn_id, request_id=request_id)
            now = self._catch_up()
            session = self._scheduler.registry.find(session_id)
            turn = session.turn
            if turn is None:
                self._session_log.require_writable()
            asked = f"interrupt {turn_id} {keep}"
            if self._session_log.earlier_answer(session_id, request_id, asked) is not None:
                self._told.when_durable(reply, session_id)
                return
            self._scheduler.interrupt(session_id, now, keep, turn_id)
            self._dispatcher.note_opened(session)
            self._session_log.requested(session_id, request_id, asked)
            if turn is not None:
                moved = SessionMoved(session_id)
                self._dispatcher.when_ended(
                    turn, Waiter(lambda: reply.done(session_id), lambda: reply.refused(moved))
                )
                return
            if keep != KEEP_ALL:
                self._note_cut(session, keep)
            self._told.when_durable(reply, session_id)

        self._when_ready(reply, session_id, act, kept_of_turn(keep, turn_id))

    def rewind(self, reply: Reply, session_id: str, turns: int, request_id: str | None = None) -> None:
        """Go back to the end of turn `turns`: that many remain."""

        def act() -> None:
            require_text(request_id=request_id)
            now = self._catch_up()
            self._session_log.require_writable()
            asked = f"rewind {turns}"
            if self._session_log.earlier_answer(session_id, request_id, asked) is None:
                session = self._scheduler.registry.find(session_id)
                before = len(session.boundaries)
                self._scheduler.rewind(session_id, turns, now)
                self._dispatcher.note_opened(session)
                if turns < before:
                    self._note_cut(session, None)
                self._session_log.requested(session_id, request_id, asked)
            self._told.when_durable(reply, session_id)

        self._when_ready(reply, session_id, act, end_of_turn(turns))

    def compact(
        self,
        reply: Reply,
        session_id: str,
        turns: tuple[int, int],
        tokens: Sequence[int],
        turn_id: str,
        request_id: str | None = None,
    ) -> None:
        """Replace turns, the first and last of which are given, by one turn of `tokens` without an answer.

        The tokens are written to follow an answer without its end token. Answers how many tokens the next
        turn computes again. The journal has all of it in one record: a crash leaves the old history or the
        new one.
        """
        first, last = turns

        def act() -> None:
            require_text(turn_id=turn_id, request_id=request_id)
            now = self._catch_up()
            self._session_log.require_writable()
            asked = f"compact {first} {last} {hashlib.sha256(pack(tokens)).hexdigest()}"
            earlier = self._session_log.earlier_answer(session_id, request_id, asked)
            if earlier is not None:
                self._told.when_durable(reply, session_id, int(earlier))
                return
            session = self._scheduler.registry.find(session_id)
            fitted = replacement(session, turns, tokens, self.loop.setup.end_tokens)
            cut = end_of_turn(first - 1)(session)
            left = self._scheduler.compact(session_id, first, last, fitted, now)
            self._dispatcher.note_opened(session)
            self._session_log.compacted(session_id, first, last, turn_id, fitted)
            if self.loop.disk is not None:
                self.loop.disk.truncated(session, cut)
            self._session_log.requested(session_id, request_id, asked, str(left))
            self._told.when_durable(reply, session_id, left)

        self._when_ready(reply, session_id, act, end_of_turn(first - 1))

    def fork(
        self,
        reply: Reply,
        session_id: str,
        child_id: str,
        turns: int | None = None,
        request_id: str | None = None,
        may_open: bool = True,
    ) -> None:
        """Open a session that continues from the end of turn `turns`, or of the last; answers its id.

        A fork that is repeated with its `request_id` answers the session that it made the first time, and is
        refused if that one is closed. Without `may_open` no session is made, only such an answer repeated.
        """

        def act() -> None:
            require_text(id=child_id, request_id=request_id)
            now = self._catch_up()
            self._session_log.require_writable()
            asked = f"fork {turns}"
            made = self._session_log.earlier_answer(session_id, request_id, asked)
            if made is None:
                if not may_open:
                    raise TooManySessions("this key has reached its limit of open sessions")
                self._session_log.require_unused(child_id)
                parent = self._scheduler.registry.find(session_id)
                child = self._scheduler.fork(session_id, child_id, now, turns)
                self._dispatcher.note_opened(parent)
                self._session_log.forked(child_id, session_id, len(child.boundaries))
                self._session_log.requested(session_id, request_id, asked, child_id)
                self._told.when_made(reply, child_id, parent.tenant, child_id)
            elif made in self._session_log.sessions:
                self._told.when_durable(reply, made, made)
            else:
                gone = RequestConflict(f"request {request_id} made session {made}, which is closed since")
                self._told.elsewhere(reply, made, gone)

        self._when_ready(reply, session_id, act, end_of_turn(turns), forks=True)

    def update(
        self,
        reply: Reply,
        session_id: str,
        metadata: dict[str, object] | None = None,
        settings: SettingsChange | None = None,
    ) -> None:
        """Replace a session's metadata, or change the settings that are given. Waits for nothing."""
        with Refusing(reply):
            check_change(settings or {})
            now = self._catch_up()
            self._session_log.require_writable()
            session = self._scheduler.registry.find(session_id)
            self._dispatcher.note_opened(session)
            entry = self._session_log.sessions.get(session_id)
            if entry is None:
                raise UnknownSession(f"session {session_id} does not exist")
            if metadata is not None:
                self._session_log.updated(session_id, metadata)
            if settings:
                ttl = settings.get("ttl", entry.ttl)
                chosen = entry.settings.changed(settings)
                self._scheduler.retain(session_id, chosen.retention(ttl), now)
                self._session_log.retained(session_id, None if ttl is None else float(ttl), chosen)
            self._told.when_durable(reply, session_id)
        self._dispatcher.tell()

    def spill(self, reply: Reply, session_id: str, tier: Tier | None = None) -> None:
        """Start moving an idle session's memory to a tier, by default the nearest with room.

        Answers whether the move began.
        """

        def act() -> None:
            reply.done(session_id, self._scheduler.spill(session_id, self.loop.now(), tier))

        self._when_ready(reply, session_id, act)

    def restore(self, reply: Reply, session_id: str) -> None:
        """Start moving an idle session's memory back to the device; answers whether the move began."""

        def act() -> None:
            reply.done(session_id, self._scheduler.restore(session_id, self.loop.now()))

        self._when_ready(reply, session_id, act)

    def _catch_up(self) -> float:
        """The time, after everything that was due by then: it also comes first in the journal."""
        now = self.loop.now()
        self._scheduler.tick(now)
        self._dispatcher.tell()
        return now

    def _note_cut(self, session: Session, kept: int | None) -> None:
        self._session_log.truncated(session.id, len(session.boundaries), kept)
        if self.loop.disk is not None:
            self.loop.disk.truncated(session, session.sequence.known)

    # --- turns ------------------------------------------------------------------------------------

    def hear(
        self, reply: Reply, session_id: str, tokens: Sequence[int] | None, known: int | None = None
    ) -> None:
        """Compute the input of the session's next turn ahead: all `tokens` that are known. Waits for nothing.

        It is taken back if no turn begins; without tokens, at once. None says that a turn is expected.
        """
        with Refusing(reply):
            self._scheduler.tick(self.loop.now())
            session = self._scheduler.registry.find(session_id)
            self._ahead.hear(session, tokens, known)
            reply.done(session_id)
        self._dispatcher.tell()

    def submit(self, listener: TurnListener, spec: TurnSpec) -> None:
        """Queue a turn, when its grammar is compiled and its session is ready for it."""
        compilation: Compilation | None = None
        if spec.grammar is not None and not self._is_repeated(spec):
            try:
                compilation = self._grammars.request(spec.grammar)
            except GrammarError as error:
                listener.refused(GrammarRefused(error))
                return
        if spec.volatile and spec.session_id is not None:
            self._follow_later(listener, spec, spec.session_id, compilation)
        elif spec.session_id is not None:
            self._submit_later(listener, spec, spec.session_id, compilation)
        elif compilation is not None:
            self._request_later(listener, spec, compilation)
        else:
            with Refusing(listener):
                self._turns.begin(listener, spec, None, None)
        self._dispatcher.tell()

    def _when_turn_ready(
        self,
        listener: TurnListener,
        queue: tuple[SessionQueues, str],
        compilation: Compilation | None,
        is_ready: Callable[[], bool],
        act: Callable[[], None],
    ) -> None:
        """Begin a turn as soon as it is ready and its grammar is compiled, after others of its queue."""

        def attempt() -> bool:
            if listener not in self._waiting:
                return True  # It was aborted while it waited.
            if (compilation is not None and compilation.state is State.WAITING) or not is_ready():
                return False
            self._waiting.discard(listener)
            with Refusing(listener):
                act()
            return True

        self._waiting.add(listener)
        queues, name = queue
        queues.add_turn(name, attempt)

    def _submit_later(
        self, listener: TurnListener, spec: TurnSpec, session_id: str, compilation: Compilation | None
    ) -> None:
        """Submit a turn as soon as its session is ready for it."""
        steers = spec.steers is not None and not self._is_repeated(spec)
        if steers:
            # The turn before stops at once; this one begins when it has ended.
            try:
                steers = not self._steering.stop(self._scheduler.registry.find(session_id), spec)
            except (Refused, SamplingError) as refusal:
                listener.refused(refusal)
                return
        wait = TurnWait(self._scheduler, session_id)
        memory = MemoryWait(self._scheduler, session_id, kept_of_turn(spec.steers, None))

        def is_ready() -> bool:
            if steers and not (self._ahead.stop(session_id) and memory.over(self.loop.now())):
                return False
            waits = self._patient or spec.steers is not None
            held = self._is_being_written(spec) or self._dispatcher.is_shedding(session_id)
            return not held and (not waits or wait.over())

        def act() -> None:
            self._require_same(session_id, wait.session)
            if steers:
                self._steering.cut(self._scheduler.registry.find(session_id), spec)
            self._submit(listener, spec, session_id, compilation)

        self._when_turn_ready(listener, (self._queues, session_id), compilation, is_ready, act)

    def _follow_later(
        self, listener: TurnListener, spec: TurnSpec, session_id: str, compilation: Compilation | None
    ) -> None:
        """Submit a volatile turn, as soon as the memory that it follows can be cut or shared.

        It does not wait for a turn before it: its client has tokens for a session of their own.
        """
        follows = spec.parent if spec.parent is not None else session_id
        is_cut = spec.parent is not None or spec.keep != spec.known
        wait = MemoryWait(self._scheduler, follows, lambda _: spec.keep or 0, spec.parent is not None)

        def is_ready() -> bool:
            return not is_cut or wait.over(self.loop.now())

        def act() -> None:
            self._require_same(follows, wait.session)
            self._follow(listener, spec, session_id, compilation)

        self._when_turn_ready(listener, (self._queues, follows), compilation, is_ready, act)

    def _request_later(self, listener: TurnListener, spec: TurnSpec, compilation: Compilation) -> None:
        """Begin a request of its own as soon as its grammar is compiled."""

        def act() -> None:
            self._turns.begin(listener, spec, None, compilation)

        self._when_turn_ready(listener, (self._requests, spec.turn_id), compilation, lambda: True, act)

    def _follow(
        self, listener: TurnListener, spec: TurnSpec, session_id: str, compilation: Compilation | None
    ) -> None:
        """Queue a volatile turn on its session; one that is made for it is closed again if it is refused."""
        now = self._catch_up()
        scheduler = self._scheduler
        if spec.parent is not None:
            session, opened = scheduler.fork(spec.parent, session_id, now, known=spec.keep), True
        elif spec.known:
            session, opened = scheduler.registry.find(session_id), False
            if session.sequence.known != spec.known:
                raise HistoryChanged("the history has changed", session)
        else:
            session, opened = scheduler.open(session_id, spec.tenant, now, volatile=True), True
        try:
            self._turns.begin(listener, spec, session, compilation)
        except (Refused, SamplingError):
            if opened:
                scheduler.close(session_id, now)
            raise

    def abort(self, listener: TurnListener, keep: int | None, reason: str) -> None:
        """End the turn of a listener, which hears of the end; a turn that is over stays as it is.

        `keep` is how many generated tokens stay, at most all: None to roll the turn back.
        """
        turn = listener.turn
        if listener in self._waiting:
            self._waiting.discard(listener)
            listener.dropped(reason)
        elif turn is not None and not turn.over:
            kept = keep if keep is None or keep == KEEP_ALL else min(keep, turn.generated)
            now = self.loop.now()
            try:
                self._scheduler.abort(turn.session_id, turn.request.turn_id, now, kept, reason)
            except Refused as refusal:
                log.info("turn %s is ending already: %s", turn.request.turn_id, refusal)
        self._dispatcher.tell()

    def _is_repeated(self, spec: TurnSpec) -> bool:
        """Whether a turn has been carried out: its grammar is not needed again."""
        if spec.session_id is None or spec.fingerprint is None:
            return False
        return self._session_log.knows_turn(spec.session_id, spec.turn_id)

    def _is_being_written(self, spec: TurnSpec) -> bool:
        """Whether a turn that is repeated has ended, and will be durable in a moment."""
        if spec.session_id is None or spec.fingerprint is None:
            return False
        return self._session_log.is_being_written(spec.session_id, spec.turn_id)

    def _submit(
        self, listener: TurnListener, spec: TurnSpec, session_id: str, compilation: Compilation | None
    ) -> None:
        """Queue a turn on a session, replay it if it has been carried out, or refuse it."""
        # A turn that is overdue ends now, and changes the history, rather than when this one is queued.
        self._scheduler.tick(self.loop.now())
        session = self._scheduler.registry.find(session_id)
        if spec.fingerprint is not None:
            finished = self._session_log.replay(session_id, spec.turn_id, spec.fingerprint)
            if finished is not None:
                listener.replayed(finished, session)
                return
        if spec.grammar is not None and compilation is None:
            raise HistoryChanged("the repeated turn was aborted meanwhile", session)
        known = session.history
        # A turn in flight changes the history too; that the session is busy is said by the core.
        is_busy = turn_before(self._scheduler, session_id) is not None
        if not is_busy and spec.opens and known:
            raise HistoryRepeated("the session has a history", session)
        if not is_busy and spec.known not in (None, known):
            raise HistoryChanged("the history has changed", session)
        if spec.steers is not None:
            spec = self._steering.fitted(session, spec)
        self._turns.begin(listener, spec, session, compilation)
