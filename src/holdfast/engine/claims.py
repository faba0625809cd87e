"""Claims: this engine takes over sessions of the journal, one by one, on request.

The journal's thread sends a claim to the store; steps continue meanwhile, and concurrent claims are
batched, so that commits wait for few statements. The answer is collected between two steps: a claimed
session is opened with its history, and recomputed with its next turn or read from a snapshot. Verbs that
would open a session of the same name wait. What is read from a session is answered while the journal
confirms that the session is this engine's (`when_owned`). Unclaimed sessions of ended owners are claimed a
few at a time (`sweep`), so that their time to live ends. Used by the verbs; absent without a store that
several engines write.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, NamedTuple

from holdfast.cluster.lives import GONE_SECONDS
from holdfast.core.errors import JournalUnavailable, Refused, SessionExists, SessionMoved, TooManySessions
from holdfast.engine.durable.records import StoredSession
from holdfast.engine.durable.recovery import recover
from holdfast.engine.durable.store import Home, OwningStore, Taken
from holdfast.engine.loop import EngineLoop

__all__ = ["Found", "SessionClaims"]

log = logging.getLogger("holdfast.engine")

SWEEP_SECONDS = 5.0
"""How often unclaimed sessions are looked for."""

UNCLAIMED_SECONDS = 20.0
"""How long ago the lease of their owner must have ended: until then a restarted engine may want them."""

SWEPT_MAX = 16
"""Sessions that one sweep claims."""

CLAIMED_MAX = 64
"""Sessions that one question to the store claims."""

ROOM_SHARE = 0.9
"""The share of its sessions up to which an engine sweeps."""

Told = Callable[["Found"], None]


class Found(NamedTuple):
    """Where a session is: here, at an engine, or nowhere; `refusal` if that could not be found out."""

    here: bool = False
    home: Home | None = None
    refusal: Refused | None = None


class Question(NamedTuple):
    """A query for the journal's thread, and the handler of its answer."""

    future: Future[Any]
    answered: Callable[[Future[Any]], None]


class SessionClaims:
    """The claims of one engine."""

    __slots__ = (
        "_after",
        "_asked",
        "_claiming",
        "_in_flight",
        "_loop",
        "_settled",
        "_store",
        "_sweep_at",
        "_sweeping",
        "_unheard",
        "_wanted",
    )

    def __init__(self, loop: EngineLoop, store: OwningStore) -> None:
        self._loop = loop
        self._store = store
        self._asked: deque[Question] = deque()
        self._claiming: dict[str, list[Told]] = {}
        """Sessions that are being claimed, and who is told."""
        self._wanted: deque[str] = deque()
        """Sessions that the next question claims."""
        self._unheard: set[str] = set()
        self._in_flight = False
        self._settled: dict[str, list[Callable[[], None]]] = {}
        """What waits for the end of a claim."""
        self._sweep_at = loop.now() + SWEEP_SECONDS
        self._sweeping = False
        self._after = ""

    @property
    def store(self) -> OwningStore:
        """The store; only the journal's thread may call it."""
        return self._store

    # --- questions --------------------------------------------------------------------------------

    def ask(self, act: Callable[[], Any], answered: Callable[[Future[Any]], None]) -> None:
        """Let the journal's thread call the store; `answered` is called between two steps."""
        self._asked.append(Question(self._loop.session_log.ask(act), answered))

    def poll(self) -> None:
        """Act on the answers that have come, in the order of the questions; sweep if it is time."""
        while self._asked and self._asked[0].future.done():
            question = self._asked.popleft()
            question.answered(question.future)
        now = self._loop.now()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_SECONDS
            self._sweep()

    def claim(self, name: str, unheard: Collection[str], told: Told) -> None:
        """Find a session, and take it over if its owner is over; `told` is called once."""
        if self._is_here(name):
            self.when_owned(
                name, lambda: told(Found(here=True)), lambda refusal: told(Found(refusal=refusal))
            )
            return
        waiting = self._claiming.get(name)
        if waiting is not None:
            waiting.append(told)
            return
        fault = self._loop.session_log.fault
        if fault is not None:
            told(Found(refusal=JournalUnavailable(f"the journal cannot be asked: {fault}")))
            return
        registry = self._loop.scheduler.registry
        if len(registry.sessions) + len(self._claiming) >= registry.policy.sessions_max:
            told(Found(refusal=TooManySessions("the engine has its maximum of open sessions")))
            return
        self._claiming[name] = [told]
        self._wanted.append(name)
        self._unheard.update(unheard)
        self._ask_for_some()

    def _ask_for_some(self) -> None:
        """Claim the requested sessions; while a query is in flight, after it."""
        if self._in_flight or not self._wanted:
            return
        self._in_flight = True
        names = [self._wanted.popleft() for _ in range(min(CLAIMED_MAX, len(self._wanted)))]
        unheard, self._unheard = self._unheard, set()
        self.ask(lambda: self._store.take_over(names, unheard), lambda future: self._claimed(names, future))

    def when_owned(self, name: str, act: Callable[[], None], refused: Callable[[Refused], None]) -> None:
        """Act on a session that this engine has, unless another engine has taken it over.

        Another one may do so when the journal has not confirmed this life for `GONE_SECONDS`, and an engine
        that was stopped meanwhile does not know. So the journal is asked first if its last word is as old.
        """

        def decide() -> None:
            if self._loop.dispatcher.is_anothers(name):
                refused(SessionMoved(name))
            else:
                act()

        def answered(future: Future[bool]) -> None:
            self._loop.flush_journal()  # Sessions that were found to be another's are given up.
            refusal = _unavailable(future)
            if refusal is not None:
                refused(refusal)
            elif not future.result():
                refused(SessionMoved(name))
            else:
                decide()

        asked = time.monotonic()
        if asked - self._store.confirmed < GONE_SECONDS:
            decide()
        else:
            self.ask(lambda: self._store.confirm(asked), answered)

    def locate(self, name: str, told: Told) -> None:
        """Find the owner of a session, and take nothing over."""

        def answered(future: Future[dict[str, Home]]) -> None:
            refusal = _unavailable(future)
            told(Found(home=future.result().get(name)) if refusal is None else Found(refusal=refusal))

        self.ask(lambda: self._store.locate([name]), answered)

    def why_refused(self, name: str, tenant: str, told: Callable[[Refused | None], None]) -> None:
        """Find out why the store refused a new session; None if its engine's life is over."""

        def answered(future: Future[Any]) -> None:
            why = None if future.exception() is not None else future.result().value
            if why == "exists":
                told(SessionExists(f"session {name} is open at another engine, or in the journal"))
            elif why == "limit":
                told(TooManySessions("the tenant has its maximum of open sessions, over all engines"))
            else:
                told(None)

        self.ask(lambda: self._store.why_refused(name, tenant), answered)

    def when_settled(self, name: str, act: Callable[[], None]) -> bool:
        """Act when the claim of a session is over; False if there is none."""
        if name not in self._claiming:
            return False
        self._settled.setdefault(name, []).append(act)
        return True

    # --- answers ----------------------------------------------------------------------------------

    def _is_here(self, name: str) -> bool:
        return name in self._loop.session_log.sessions and name in self._loop.scheduler.registry.sessions

    def _claimed(self, names: Collection[str], future: Future[Taken]) -> None:
        self._in_flight = False
        refusal = _unavailable(future)
        taken = Taken([], {}) if refusal is not None else future.result()
        for stored in taken.sessions:
            self._open(stored)
        for name in names:
            found = self._found(name, taken) if refusal is None else Found(refusal=refusal)
            for told in self._claiming.pop(name, ()):
                told(found)
            for act in self._settled.pop(name, ()):
                act()
        self._ask_for_some()

    def _found(self, name: str, taken: Taken) -> Found:
        """What became of one session of a claim."""
        if self._is_here(name):
            return Found(here=True)
        reason = self._loop.session_log.unrecovered.get(name)
        if reason is not None:
            return Found(refusal=JournalUnavailable(f"session {name} cannot be recovered: {reason}"))
        if any(stored.id == name for stored in taken.sessions):
            return Found(refusal=JournalUnavailable(f"an older session {name} is being closed"))
        return Found(home=taken.elsewhere.get(name))

    def _open(self, stored: StoredSession) -> None:
        loop = self._loop
        loop.session_log.unrecovered.pop(stored.id, None)
        if stored.id not in loop.scheduler.registry.sessions:
            recover(loop.scheduler, loop.session_log, loop.disk, stored, loop.now())
            log.info("session %s was taken over with %d turns", stored.id, len(stored.turns))

    # --- what nobody asks for ---------------------------------------------------------------------

    def _sweep(self) -> None:
        """Claim some of the unclaimed sessions of ended owners."""
        registry, after = self._loop.scheduler.registry, self._after
        full = len(registry.sessions) >= ROOM_SHARE * registry.policy.sessions_max
        if self._sweeping or full or self._loop.session_log.fault is not None:
            return
        self._sweeping = True

        def answered(future: Future[list[str]]) -> None:
            self._sweeping = False
            names = [] if future.exception() is not None else future.result()
            self._after = names[-1] if names else ""
            for name in names:
                self.claim(name, (), lambda _: None)

        self.ask(lambda: self._store.unclaimed(after, UNCLAIMED_SECONDS, SWEPT_MAX), answered)


def _unavailable(future: Future[Any]) -> JournalUnavailable | None:
    """The refusal of a question that the store could not answer."""
    error = future.exception()
    return None if error is None else JournalUnavailable(str(error) or type(error).__name__)
