"""The verbs of clients, each written once: wait, act on the core, write the journal, acknowledge.

    open  submit  abort  hear  interrupt  rewind  compact  fork  update  spill  restore  close

Used by `engine.Session` in this process and by the engine process behind the server (`server.link.commands`).
A verb that cannot act yet waits for its session (`waiting`) until a `retry` between two steps; a turn also
waits until its grammar is compiled. A verb is acknowledged to its `Reply` when its records are durable;
without a journal, at once. A verb that is refused has changed nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from holdfast.core.errors import RequestConflict, SessionMoved, TooManySessions, UnknownSession
from holdfast.core.layout import Tier
from holdfast.core.tokens import pack
from holdfast.core.turn import KEEP_ALL
from holdfast.engine.claims import SessionClaims
from holdfast.engine.durable.session_log import Tools, Waiter, require_text
from holdfast.engine.listeners import Refusing, Reply, TurnListener
from holdfast.engine.loop import EngineLoop
from holdfast.engine.session_settings import DEFAULT_SETTINGS, SettingsChange, check_change
from holdfast.engine.turns.acknowledgements import Acknowledgements
from holdfast.engine.turns.history import catch_up, note_cut, require_same
from holdfast.engine.turns.listening import Ahead
from holdfast.engine.turns.replacement import replacement
from holdfast.engine.turns.spec import TurnSpec
from holdfast.engine.turns.submission import Submission
from holdfast.engine.turns.waiting import (
    Length,
    MemoryWait,
    SessionQueues,
    end_of_turn,
    kept_of_turn,
    never_spent,
    no_memory,
    turn_before,
)

__all__ = ["Verbs", "never_spent"]


class Verbs:
    """The verbs on the sessions of one engine."""

    __slots__ = (
        "_ahead",
        "_dispatcher",
        "_queues",
        "_scheduler",
        "_session_log",
        "_submission",
        "_told",
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
        self._queues = SessionQueues(lambda name: turn_before(loop.scheduler, name) is not None)
        self._submission = Submission(loop, self._queues, self._ahead, patient)
        journal = loop.session_log.journal
        owning = None if journal is None else journal.owning
        self.claims = None if owning is None else SessionClaims(loop, owning)
        """Sessions that are taken over from other engines, where the journal is shared with them."""
        self._told = Acknowledgements(loop.session_log, self.claims)

    # --- waiting ----------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether a verb or a turn waits for its session, or a turn for its grammar."""
        return bool(self._queues) or self._submission.waits

    @property
    def compiles(self) -> bool:
        """Whether a grammar is being compiled: its descriptor tells the end of that."""
        return self._submission.compiles

    def retry(self, spent: Callable[[], bool] = never_spent) -> None:
        """Try some of what waits, until `spent`."""
        if self.claims is not None:
            self.claims.poll()
        self._submission.retry(spent)
        if self._queues:
            self._queues.retry(spent)
            self._dispatcher.tell()

    def rest(self, seconds: float) -> None:
        """Wait for a grammar where a turn waits for one and the loop has nothing to do."""
        if self.waits and not self.loop.active:
            self._submission.wait_for_grammars(seconds)

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
                require_same(self.loop, session_id, wait.session)
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
            now = catch_up(self.loop)
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
            now = catch_up(self.loop)
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
                note_cut(self.loop, session, keep)
            self._told.when_durable(reply, session_id)

        self._when_ready(reply, session_id, act, kept_of_turn(keep, turn_id))

    def rewind(self, reply: Reply, session_id: str, turns: int, request_id: str | None = None) -> None:
        """Go back to the end of turn `turns`: that many remain."""

        def act() -> None:
            require_text(request_id=request_id)
            now = catch_up(self.loop)
            self._session_log.require_writable()
            asked = f"rewind {turns}"
            if self._session_log.earlier_answer(session_id, request_id, asked) is None:
                session = self._scheduler.registry.find(session_id)
                before = len(session.boundaries)
                self._scheduler.rewind(session_id, turns, now)
                self._dispatcher.note_opened(session)
                if turns < before:
                    note_cut(self.loop, session, None)
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
            now = catch_up(self.loop)
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
            now = catch_up(self.loop)
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
            now = catch_up(self.loop)
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
        self._submission.submit(listener, spec)

    def abort(self, listener: TurnListener, keep: int | None, reason: str) -> None:
        """End the turn of a listener, which hears of the end; a turn that is over stays as it is.

        `keep` is how many generated tokens stay, at most all: None to roll the turn back.
        """
        self._submission.abort(listener, keep, reason)
