"""Answers to verbs, when their records are durable; where the store refuses them, the reason is found out.

Used by the verbs.
"""

from __future__ import annotations

from holdfast.core.errors import Refused, SessionMoved
from holdfast.engine.claims import Found, SessionClaims
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.listeners import Reply

__all__ = ["Acknowledgements"]


class Acknowledgements:
    """The answers that wait for the journal of one engine."""

    __slots__ = ("_claims", "_session_log")

    def __init__(self, session_log: SessionLog, claims: SessionClaims | None) -> None:
        self._session_log = session_log
        self._claims = claims

    def when_durable(self, reply: Reply, session_id: str, answer: object = None) -> None:
        """Answer when everything so far is durable."""
        self._session_log.when_durable(
            session_id,
            lambda: reply.done(session_id, answer),
            lambda: reply.refused(SessionMoved(session_id)),
        )

    def when_made(self, reply: Reply, session_id: str, tenant: str, answer: object = None) -> None:
        """Answer when a new session is durable; where the store refuses it, say why."""
        moved = SessionMoved(session_id)

        def refused() -> None:
            if self._claims is None:
                reply.refused(moved)
            else:
                self._claims.why_refused(session_id, tenant, lambda why: reply.refused(why or moved))

        self._session_log.when_durable(session_id, lambda: reply.done(session_id, answer), refused)

    def elsewhere(self, reply: Reply, session_id: str, gone: Refused) -> None:
        """Answer with a session that another engine has; refuse if it is closed, or the journal is away."""
        if self._claims is None:
            raise gone

        def told(found: Found) -> None:
            if found.home is None:
                reply.refused(found.refusal or gone)
            else:
                reply.done(None, session_id)

        self._claims.locate(session_id, told)
