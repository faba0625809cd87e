"""What stands in a history in place of some turns: tokens that fit between the turns before and after."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast.core.session import Session
from holdfast.engine.turns.waiting import end_of_turn

__all__ = ["replacement"]


def replacement(
    session: Session, turns: tuple[int, int], tokens: Sequence[int], ends: Collection[int]
) -> tuple[int, ...]:
    """Tokens as they stand instead of the first to the last of `turns`: each answer has its end token once.

    A turn's input begins with the end token of the answer before it only where that answer has none. `ends`
    are the end tokens.
    """
    first, last = turns
    log, boundaries = session.sequence.tokens, session.boundaries
    fitted = tuple(tokens)
    before, after = end_of_turn(first - 1)(session), end_of_turn(last)(session)
    if before and fitted[:1] == (log[before - 1],) and fitted[0] in ends:
        fitted = fitted[1:]
    if after and last < len(boundaries) and log[after - 1] in ends:
        fitted += (log[after - 1],)
    return fitted
