"""What a verb requires before it changes anything: each function raises a refusal, or returns."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core import errors
from holdfast.core.layout import Component
from holdfast.core.registry import Registry
from holdfast.core.tokens import all_known
from holdfast.core.turn import TurnRequest


def require_new_session(registry: Registry, session_id: str, tenant: str) -> None:
    """Raise unless a session of this name may be opened."""
    policy = registry.policy
    if session_id in registry.sessions:
        raise errors.SessionExists(f"session {session_id} is open already")
    if len(registry.sessions) >= policy.sessions_max:
        raise errors.TooManySessions(f"the server has {policy.sessions_max} open sessions, the maximum")
    if registry.tenants.get(tenant, 0) >= policy.tenant_sessions_max:
        raise errors.TooManySessions(
            f"the tenant has {policy.tenant_sessions_max} open sessions, the maximum"
        )


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
    policy = registry.policy
    if not request.tokens and not (request.goes_on and known and request.max_tokens):
        raise errors.EmptyTurn("the turn has no input tokens")
    if request.max_tokens < 0:
        raise errors.BadMaxTokens(f"max_tokens must be at least 0, not {request.max_tokens}")
    require_known_tokens(registry, request.turn_id, request.tokens)
    total = known + len(request.tokens) + request.max_tokens
    if total > policy.context_length:
        raise errors.ContextExceeded(total, policy.context_length)
    _require_memory(registry, tenant, total, drafting)
    if len(registry.queues.waiting.turns) >= policy.queue_max:
        raise errors.QueueFull(f"the queue is full: {policy.queue_max} turns are waiting")


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
