"""Falling back: the ways in which a sequence comes to have computed less.

A turn that is kept in part, rolled back or retracted, and a session that is rewound, all do the same: let
`computed` fall to the nearest length from which every component can resume, and free the memory past it.
They differ in what becomes of the tokens. Nothing here recomputes, and nothing allocates, except that a cut
inside the leased prefix takes a copy of the one page that it leaves partly filled.
"""

from __future__ import annotations

from holdfast.core.layout import Component
from holdfast.core.ledger import Hold, Holder, OutOfUnits
from holdfast.core.plan import UnitCopy
from holdfast.core.points import Run
from holdfast.core.sequence import Sequence


def resume_length(sequence: Sequence, limit: int) -> int:
    """The greatest length at or below `limit` from which every component can continue."""
    if sequence.computed <= limit:
        return sequence.computed
    if not sequence.ledger.layout.state and sequence.window_covers(limit):
        return limit
    for point in reversed(sequence.points):
        if point.length <= limit:
            return point.length
    return 0


def fall_back(sequence: Sequence, limit: int) -> list[UnitCopy]:
    """Let computed fall to the nearest resumable length at or below `limit`.

    Only a cut inside the leased prefix needs new units (a copy of the partial page); without room for them
    this raises and changes nothing. The copies returned belong into the very next plan.
    """
    length = resume_length(sequence, limit)
    copies, partial = _prepare_shorter_lease(sequence, length)
    if sequence.window is not None and length < sequence.computed:
        first = sequence.ledger.layout.window_first_page(length)
        sequence.gather_window(first)
        sequence.changed = min(sequence.changed, first)
    while sequence.points and sequence.points[-1].length > length:
        sequence.drop_point(sequence.points[-1])
    if sequence.points and sequence.points[-1].length == length:
        sequence.become(sequence.points.pop())
    elif length == 0 and sequence.state is not None:
        sequence.state.release(sequence.fence)
        sequence.state = None
    sequence.computed = sequence.planned = length
    sequence.trim_copy()
    if sequence.lease is not None and length < sequence.lease.length:
        _shorten_lease(sequence, length, partial)
    else:
        sequence.give_back()
    return copies


def forget_rows(sequence: Sequence) -> int:
    """Rows in flight are lost, and what they wrote may be half done. Returns the length that is certain.

    Pages past `computed` are simply written again. A recurrent state is changed in place, so only a resume
    point can be trusted: the caller lets the sequence fall back to the length returned.
    """
    mark = sequence.mark
    while sequence.points and sequence.points[-1].length > sequence.computed:
        lost = sequence.points[-1]
        if mark is not None and mark.successor is lost:
            mark.successor = None
        sequence.drop_point(lost)
    sequence.planned = sequence.computed
    if sequence.spare is not None:
        sequence.spare.release(sequence.fence)
        sequence.spare = None
    if not sequence.ledger.layout.state:
        return sequence.computed
    return sequence.points[-1].length if sequence.points else 0


def keep(
    sequence: Sequence, known: int, holder: Holder, checkpoints: Holder, certain: int | None = None
) -> list[UnitCopy]:
    """End the turn with its first tokens up to `known`; computed falls back as far as it must."""
    copies = fall_back(sequence, known if certain is None else min(known, certain))
    sequence.tokens.cut(known)
    sequence.commit(holder, checkpoints)
    return copies


def rollback(sequence: Sequence, holder: Holder, checkpoints: Holder, certain: int | None = None) -> None:
    """End the turn as if it had never begun. Allocates nothing and recomputes no history."""
    assert sequence.mark is not None, "no turn to roll back"
    copies = keep(sequence, sequence.mark.known, holder, checkpoints, certain)
    assert not copies, "a mark lies at or past the lease, or at the very start"


def retract(sequence: Sequence, holder: Holder, checkpoints: Holder, certain: int | None = None) -> None:
    """Free the turn's computed memory, but keep its known tokens: they will be recomputed."""
    assert sequence.mark is not None, "no turn to retract"
    known = sequence.mark.known
    copies = fall_back(sequence, known if certain is None else min(known, certain))
    assert not copies, "a mark lies at or past the lease, or at the very start"
    sequence.commit(holder, checkpoints)


def _prepare_shorter_lease(sequence: Sequence, length: int) -> tuple[list[UnitCopy], list[Hold]]:
    """Take copies of the page that a cut at `length` leaves partly filled, if the tree holds it."""
    lease, ledger = sequence.lease, sequence.ledger
    layout = ledger.layout
    if lease is None or length >= lease.length or length % layout.page_size == 0:
        return [], []
    page = length // layout.page_size
    sources: list[tuple[Component, int]] = []
    if layout.full:
        sources.append((Component.FULL, lease.full_units(page)[0]))
    if sequence.window is not None and not _owns_window_page(sequence, sequence.window, page, length):
        sources.append((Component.WINDOW, lease.window_units(page)[0]))
    taken: list[Hold] = []
    copies: list[UnitCopy] = []
    try:
        for component, unit in sources:
            hold = ledger.take(ledger.pool(component), 1, sequence.holder)
            taken.append(hold)
            copies.append(UnitCopy(component, unit, hold.units[0]))
    except OutOfUnits:
        for hold in taken:
            hold.release()
        raise
    return copies, taken


def _owns_window_page(sequence: Sequence, run: Run, page: int, length: int) -> bool:
    """Whether the window page that a cut at `length` leaves partly filled is the sequence's own.

    It is if the current window has it, or a point at or past the cut: such a point gives it down.
    """
    if run.first <= page:
        return True
    windows = [point.window for point in sequence.points if point.length >= length]
    return any(window is not None and window.first <= page < window.end for window in windows)


def _shorten_lease(sequence: Sequence, length: int, partial: list[Hold]) -> None:
    """Lean on the whole pages below `length` only, and own the partial page instead."""
    lease, layout, run = sequence.lease, sequence.ledger.layout, sequence.window
    assert lease is not None
    aligned = length // layout.page_size
    if sequence.full is not None:
        sequence.full.shrink(len(sequence.full), sequence.fence)
    if run is not None:
        own_end = layout.pages_for(length) if run.first <= aligned else run.first
        run.hold.shrink(max(0, run.end - own_end), sequence.fence)
        if not len(run.hold):
            run.first = aligned
    # The copy is planned in the next step: until that has settled, its source must not be used again.
    lease.shorten(aligned * layout.page_size, max(sequence.fence, sequence.ledger.step + 1 if partial else 0))
    for copied in partial:
        own = (
            sequence.full
            if copied.pool.component is Component.FULL
            else run.hold
            if run is not None
            else None
        )
        assert own is not None
        own.join(copied)
    sequence.stand_at(length)
