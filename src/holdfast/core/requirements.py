"""Preconditions of verbs: each function raises a refusal, or returns."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core import errors
from holdfast.core.layout import Component
from holdfast.core.registry import Registry
from holdfast.core.session import Life, Session
from holdfast.core.tokens import all_known
from holdfast.core.turn import TurnRequest


def require_new_session(registry: Registry, session_id: str, tenant: str, volatile: bool = False) -> None:
    """Raise unless a session of this name may be opened; volatile ones count towards no limit."""
    policy = registry.policy
    if session_id in registry.sessions:
        raise errors.SessionExists(f"session {session_id} is open already")
    if volatile:
        return
    if len(registry.sessions) - registry.volatile >= policy.sessions_max:
        raise errors.TooManySessions(f"the server has {policy.sessions_max} open sessions, the maximum")
    if registry.tenants.get(tenant, 0) >= policy.tenant_sessions_max:
        raise errors.TooManySessions(
            f"the tenant has {policy.tenant_sessions_max} open sessions, the maximum"
        )


def require_free(session: Session) -> Session:
    """The session; raises if it has a turn in flight, or is being closed."""
    if session.life not in (Life.IDLE, Life.SEALING):
        turn = session.turn.request.turn_id if session.turn is not None else "none"
        raise errors.SessionBusy(f"session {session.id} is {session.state}, with turn {turn}")
    return session


def require_history(session: Session, known: int) -> None:
    """Raise unless a session has `known` tokens."""
    if not 0 <= known <= session.sequence.known:
        raise errors.UnknownBoundary(f"session {session.id} has {session.sequence.known} tokens, not {known}")


def require_known_tokens(registry: Registry, turn_id: str, tokens: Sequence[int]) -> None:
    """Raise unless the tokens of a turn are in the vocabulary.

    Every token of a client or of a journal passes here before a row can carry it; the settler checks what is
    sampled.
    """
    vocabulary = registry.policy.vocabulary
    if not all_known(tokens, vocabulary):
        raise errors.UnknownToken(turn_id, vocabulary)


def require_fit(registry: Registry, tenant: str, known: int, request: TurnRequest, drafting: bool) -> None:
    """Raise unless a turn may follow `known` tokens, and may wait."""
    if not request.tokens and not (request.goes_on and known and request.max_tokens):
        raise errors.EmptyTurn("the turn has no input tokens")
    require_length(registry, tenant, known, request, drafting)
    policy = registry.policy
    if len(registry.queues.waiting.turns) >= policy.queue_max:
        raise errors.QueueFull(f"the queue is full: {policy.queue_max} turns are waiting")


def require_length(registry: Registry, tenant: str, known: int, request: TurnRequest, drafting: bool) -> None:
    """Raise unless a turn fits after `known` tokens; its input may be empty."""
    policy = registry.policy
    if request.max_tokens < 0:
        raise errors.BadMaxTokens(f"max_tokens must be at least 0, not {request.max_tokens}")
    require_known_tokens(registry, request.turn_id, request.tokens)
    total = known + len(request.tokens) + request.max_tokens
    if total > policy.context_length:
        raise errors.ContextExceeded(total, policy.context_length)
    _require_memory(registry, tenant, total, drafting)


def _require_memory(registry: Registry, tenant: str, total: int, drafting: bool) -> None:
    """Raise if a turn could not run even with all of memory, or of its tenant's quota, to itself."""
    ledger = registry.ledger
    layout = ledger.layout
    window_pages = 2 * (layout.pages_for(layout.window) + 1) + 1
    needs = {
        Component.FULL: layout.pages_for(total),
        Component.WINDOW: min(layout.pages_for(total), window_pages),
        Component.STATE: 3 if drafting else 2,
    }
    for component in layout.components:
        pool = ledger.pool(component)
        available = pool.size - len(pool.quarantine)
        if needs[component] > available:
            raise errors.TooLarge(component.name.lower(), needs[component], available)
        limit = ledger.account(tenant).limits[pool.index]
        if needs[component] > limit:
            raise errors.OverQuota(component.name.lower(), needs[component], limit)
