"""Clients that send their whole conversation with each request, and verbs that name a length in tokens.

A server finds the session of such a client by its text. The session is volatile: it may be lost at any time,
and the client resends the conversation. A request without the end of the last turn cuts the session and
continues in one operation; a request that goes back further forks it at a token; if the session is busy, the
request runs in a new session. Called by the world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from holdfast.core import errors
from holdfast.core.layout import Tier
from holdfast.core.session import Place, Session
from holdfast.core.turn import TurnRequest
from holdfast.sim.clients import TENANTS, VOCABULARY, Clients
from holdfast.sim.found import Check, Found
from holdfast.sim.reference import Conversation

CHATS_MAX = 6
"""Volatile sessions that a server keeps; it closes the oldest at rest for a new one."""


class AllClients(Clients):
    """All clients of one scheduler, those that know no sessions among them."""

    def perform(self, name: str) -> None:
        """Carry out an action by its name."""
        action = CHAT_ACTIONS.get(name)
        if action is None:
            super().perform(name)
        else:
            action(self)

    # --- chats ------------------------------------------------------------------------------------

    def chat(self) -> None:
        """Send a conversation: a new one, or one that has a session, perhaps without its end."""
        chats = [name for name in self.sessions if self.conversations[name].volatile]
        if not chats or self.rng.random() < 0.08:
            self._begin_chat((), self.rng.choice(TENANTS))
            return
        self.whom = self.rng.choice(chats)
        session = self.scheduler.registry.sessions[self.whom]
        conversation = self.conversations[self.whom]
        if session.turn is not None or session.unsettled:
            if self.rng.random() < 0.2:
                self._begin_chat(tuple(conversation.tokens), session.tenant)
            return
        length = self._length_in(conversation)
        if length < conversation.last_start:
            session = self._fork(session, length)
            self._make_room_for_a_chat(session)
        self._follow(session, length)

    def _begin_chat(self, history: tuple[int, ...], tenant: str) -> None:
        """Open a volatile session, and submit a conversation as its first input."""
        if not self._make_room_for_a_chat():
            return
        name = self.name("s")
        session = self.scheduler.open(name, tenant, self.now, volatile=True)
        self.welcome(name, Conversation(name, VOCABULARY, tenant, volatile=True))
        self.accepted()
        known = len(history) + (not history)
        request = self._request(known, tenant)
        self._submit(session, replace(request, tokens=(*history, *request.tokens)))

    def _make_room_for_a_chat(self, new: Session | None = None) -> bool:
        """Close the oldest volatile sessions at rest until there is room for another one.

        Without a session at rest there is none: the server is busy enough.
        """
        sessions = self.scheduler.registry.sessions
        chats = [sessions[name] for name in self.sessions if self.conversations[name].volatile]
        idle = sorted(
            (each for each in chats if each.turn is None and each is not new), key=lambda each: each.number
        )
        excess = len(chats) + (new is None) - CHATS_MAX
        for session in idle[: max(0, excess)]:
            self._close(session)
        self.hear(self.scheduler.take_events())
        self.accepted()
        return excess <= len(idle)

    def _length_in(self, conversation: Conversation) -> int:
        """A length of a conversation: its whole, one inside its last turn, or any."""
        known = len(conversation.tokens)
        last = self.rng.randint(conversation.last_start, known)
        return self.rng.choice((known, known, last, last, self.rng.randint(0, known)))

    def _follow(self, session: Session, length: int) -> None:
        """Submit a turn that follows the first `length` tokens of a session; the others are cut."""
        conversation = self.conversations[session.id]
        request = self._request(length, session.tenant)
        before = self._session_books(session.id)
        try:
            self.scheduler.submit(session.id, request, self.now, keep=length)
        except errors.Refused as refused:
            if self._session_books(session.id) != before:
                what = f"{request.turn_id} was refused with {refused.code}, but changed {session.id}"
                raise Found(Check.REFUSAL, what, session.id) from refused
            raise
        conversation.cut_to(length)
        self.begin(session.id, request)
        self.turns += 1
        self._check_shared(session)

    def _check_shared(self, session: Session) -> None:
        """A volatile session gives its whole pages to the tree before a turn, where that costs nothing."""
        registry, sequence = self.scheduler.registry, session.sequence
        layout, lease = registry.ledger.layout, sequence.lease
        at_home = lease is not None and session.place is Place.HOME and not session.unsettled
        if session.volatile and layout.cuts_anywhere and at_home and not registry.copying(session):
            assert lease is not None
            whole = sequence.computed - sequence.computed % layout.page_size
            if lease.length < whole:
                what = f"{lease.length} of {whole} tokens are shared with requests that come during a turn"
                raise Found(Check.RECOMPUTATION, what, session.id)

    # --- lengths in tokens ------------------------------------------------------------------------

    def fork_at(self) -> None:
        """Fork any session at a token."""
        session = self.some()
        if session is not None:
            self._fork(session, self._length_in(self.conversations[session.id]))

    def _fork(self, session: Session, length: int) -> Session:
        conversation = self.conversations[session.id]
        name = self.name("s")
        child = self.scheduler.fork(session.id, name, self.now, known=length)
        self.welcome(name, conversation.fork_at(name, length))
        self.compare(child)
        if child.volatile != session.volatile:
            raise Found(Check.REGISTRY, f"{name} is not of the kind of its parent {session.id}", name)
        self.accepted()
        return child

    def turn_at(self) -> None:
        """Submit a turn on any session that follows a part of its history."""
        session = self.some()
        if session is not None:
            self._follow(session, self._length_in(self.conversations[session.id]))

    def keep_too_much(self) -> None:
        """Cut and go on with more than fits, or at a length that a session does not have; fork there."""
        session = self.some()
        if session is None:
            return
        size = self.scheduler.registry.policy.context_length
        part = self.rng.randint(0, session.sequence.known)
        self._refuse(session.id, TurnRequest(self.name("t"), (1,) * size, 3), keep=part)
        length = self.rng.choice((-1, session.sequence.known + 1))
        request = TurnRequest(self.name("t"), (1, 2), 3)
        self._refuse(session.id, request, keep=length)
        before = self._session_books(session.id)
        try:
            self.scheduler.fork(session.id, self.name("s"), self.now, known=length)
        except errors.Refused as refused:
            if self._session_books(session.id) != before:
                raise Found(Check.REFUSAL, f"a refused fork changed {session.id}", session.id) from refused
            return
        raise Found(Check.REFUSAL, f"{session.id} was forked at {length} tokens", session.id)

    # --- tiers ------------------------------------------------------------------------------------

    def write_out(self) -> None:
        """Spill a session to disk by hand, as the engine does when it shuts down."""
        session = self.some()
        if session is not None and self.scheduler.registry.ledger.has(Tier.DISK):
            self.scheduler.spill(session.id, self.now, Tier.DISK)

    def restore(self) -> None:
        """Restore the memory of a session by hand."""
        session = self.some()
        if session is not None:
            self.scheduler.restore(session.id, self.now)


CHAT_ACTIONS: dict[str, Callable[[AllClients], None]] = {
    "chat": AllClients.chat,
    "turn at": AllClients.turn_at,
    "fork at": AllClients.fork_at,
    "keep too much": AllClients.keep_too_much,
    "write out": AllClients.write_out,
    "restore": AllClients.restore,
}
