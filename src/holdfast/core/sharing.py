"""How sequences share memory: only through the prefix tree.

`lean` starts an empty sequence from a leased prefix, `publish` moves a sequence's whole pages into the
tree, `reclaim` takes back those that no other sequence leases, `fork` lets a second sequence go on from where
a first one is, and `leave_history` hands a closing session's memory to the tree. Whole pages are shared; at
most one partly filled page and one state slot are copied. Each takes all it needs, or raises and changes
nothing.
"""

from __future__ import annotations

from holdfast.core.fallback import resume_length
from holdfast.core.layout import Component
from holdfast.core.lease import Lease
from holdfast.core.ledger import Hold, OutOfUnits
from holdfast.core.plan import UnitCopy
from holdfast.core.points import ResumePoint, Run
from holdfast.core.prefix import PrefixTree
from holdfast.core.sequence import Sequence


def lean(sequence: Sequence, lease: Lease, length: int, sources: dict[Component, int]) -> list[UnitCopy]:
    """Start an empty sequence from a leased prefix of `length` tokens.

    The part past the lease's whole pages is copied from the units in `sources`, by component. Takes the
    copies or raises; on a failure the caller still owns the lease. The copies belong into the next plan.
    """
    assert sequence.computed == sequence.planned == 0, "only an empty sequence can lean"
    assert sequence.mark is None and sequence.lease is None, "only an empty sequence can lean"
    ledger = sequence.ledger
    taken: dict[Component, Hold] = {}
    try:
        for component in sources:
            taken[component] = ledger.take(ledger.pool(component), 1, sequence.holder)
    except OutOfUnits:
        for hold in taken.values():
            hold.release()
        raise
    copies = [UnitCopy(component, unit, taken[component].units[0]) for component, unit in sources.items()]
    sequence.lease = lease
    sequence.state = taken.get(Component.STATE)
    if sequence.full is not None and Component.FULL in taken:
        sequence.full.join(taken[Component.FULL])
    if sequence.window is not None:
        sequence.window.first = lease.pages
        if Component.WINDOW in taken:
            sequence.window.hold.join(taken[Component.WINDOW])
    sequence.stand_at(length)
    return copies


def tail_sources(lease: Lease) -> dict[Component, int]:
    """The units of a leased tail, by component, for its lessee to copy."""
    tail = lease.tail
    assert tail is not None, "this lease has no tail"
    holds = ((Component.FULL, tail.full), (Component.WINDOW, tail.window), (Component.STATE, tail.state))
    return {component: hold.units[0] for component, hold in holds if hold is not None}


def publish(
    tree: PrefixTree, sequence: Sequence, length: int, rank: int = 0, give_states: bool = True
) -> None:
    """Move the whole pages below `length` into the tree and lean on them.

    Points at page boundaries on the way give their states to the tree, except the mark's and one that the
    next row reads. Without `give_states` a session keeps all its checkpoints. Points that stay lean on what
    was published; their window pages go in with it.
    """
    lease = sequence.lease
    assert lease is not None, "only a leaning sequence can publish"
    assert length <= sequence.computed, "only computed tokens can be published"
    end = length // sequence.ledger.layout.page_size
    if sequence.window is not None:
        _share_window_below(tree, sequence, lease, sequence.window)
    page_size = sequence.ledger.layout.page_size
    given = sequence.points if give_states else []
    stops = [point.length // page_size for point in given if point.length % page_size == 0]
    for stop in [*stops, end]:
        if lease.pages < stop <= end:
            _publish_pages(tree, sequence, lease, stop, rank)
            if give_states:
                _give_state(tree, sequence, lease)


def _publish_pages(tree: PrefixTree, sequence: Sequence, lease: Lease, end: int, rank: int) -> None:
    """Move the sequence's own pages below page `end` into the tree."""
    page_size = sequence.ledger.layout.page_size
    start, aligned = lease.length, end * page_size
    full: Hold | None = None
    if sequence.full is not None:
        full = sequence.full.split_front(end - lease.pages)
        full.fence(sequence.fence)
    window: Run | None = None
    if sequence.window is not None:
        window = _window_to_publish(sequence, lease, sequence.window, end)
    changed = tree.extend(lease, sequence.tokens.packed(start, aligned), full, window, rank)
    sequence.changed = min(sequence.changed, changed)


def _give_state(tree: PrefixTree, sequence: Sequence, lease: Lease) -> None:
    """Leave the state of a point at the lease's end in the tree, if the sequence can do without it."""
    point = next((point for point in sequence.points if point.length == lease.length), None)
    marked = sequence.mark is not None and sequence.mark.point is point
    if point is None or point.state is None or marked or point.length == sequence.computed:
        return
    point.state.fence(sequence.fence)
    tree.set_state(lease, point.state)
    point.state = None
    sequence.drop_point(point)


def _share_window_below(tree: PrefixTree, sequence: Sequence, lease: Lease, run: Run) -> None:
    """Gather the window pages that adjoin the current ones; those under the lease go to the tree's nodes."""
    sequence.gather_window(0)
    if run.first < lease.pages:
        below = run.hold.split_front(min(lease.pages - run.first, len(run.hold)))
        below.fence(sequence.fence)
        tree.fill_window(lease, Run(below, run.first))
        sequence.changed = min(sequence.changed, run.first)
        run.first = lease.pages


def _window_to_publish(sequence: Sequence, lease: Lease, run: Run, end: int) -> Run:
    """Take the window pages below page `end` from a sequence."""
    if run.first > lease.pages:
        # A gap: what points read of the tree's window would no longer adjoin what is leased.
        for point in [point for point in sequence.points if sequence.leans_for_window(point)]:
            sequence.drop_point(point)
    first = min(run.first, end)
    hold = run.hold.split_front(end - first)
    hold.fence(sequence.fence)
    run.first = max(run.first, end)
    return Run(hold, first)


def reclaim(tree: PrefixTree, sequence: Sequence) -> None:
    """Take back what the tree keeps for this sequence alone: what it published, if no other leases it.

    The sequence is at rest. Points that read window pages of the tree are given up.
    """
    lease = sequence.lease
    assert lease is not None and sequence.mark is None and not sequence.away, (
        "only a sequence at rest, at home"
    )
    alone_from = tree.alone_from(lease)
    if lease.length == alone_from:
        return
    if sequence.window is not None:
        for point in [point for point in sequence.points if sequence.leans_for_window(point)]:
            sequence.drop_point(point)
    while lease.length > alone_from:
        taken = tree.withdraw(lease)
        if sequence.full is not None and taken.full is not None:
            whole = taken.full.move_to(sequence.holder)
            whole.join(sequence.full)
            sequence.full = whole
        if sequence.window is not None and taken.window is not None:
            _take_window_back(sequence, sequence.window, Run(taken.window, taken.first))
        if taken.state is not None and sequence.state is None:
            sequence.state = taken.state.move_to(sequence.holder)
        elif taken.state is not None:
            # A fork has a copy of the state that it leases.
            taken.state.release(sequence.fence)


def _take_window_back(sequence: Sequence, run: Run, taken: Run) -> None:
    """Put window pages before the sequence's own, as far as it reads and lacks them.

    A plan may read the others through the lease until its fence: a fork copies from there.
    """
    keep = max(taken.first, sequence.ledger.layout.window_first_page(sequence.computed))
    if run.first > taken.end or keep >= run.first:
        taken.hold.release(sequence.fence)
        return
    taken.hold.split(run.first - taken.first).release(sequence.fence)
    taken.hold.shrink_front(keep - taken.first, sequence.fence)
    whole = taken.hold.move_to(sequence.holder)
    whole.join(run.hold)
    run.hold, run.first = whole, keep


def fork(tree: PrefixTree, parent: Sequence, child: Sequence, limit: int) -> list[UnitCopy]:
    """Let an empty `child` go on from the greatest resumable length of `parent` at or below `limit`.

    The parent is at rest. Its whole pages move into the tree and both lean on them; the partly filled page
    and the state are copied for the child. A checkpoint whose window pages lie apart from the parent's
    current window cannot be shared: it goes to the child. The child's token log is the caller's to fill.
    """
    layout = parent.ledger.layout
    assert parent.mark is None and parent.planned == parent.computed, "fork a sequence at rest"
    assert parent.lease is not None, "fork a leaning sequence"
    publish(tree, parent, parent.computed, rank=1, give_states=False)
    length = resume_length(parent, limit)
    page = length // layout.page_size
    point = next((point for point in parent.points if point.length == length), None)
    apart = _bring_apart(parent, point) if point is not None else None
    window_first = page if apart is not None else min(layout.window_first_page(length), page)
    lease = tree.share(parent.lease, child.holder.name, page, window_first)
    sources = _copy_sources(parent, length, point, page)
    if apart is not None:
        sources = {Component.FULL: sources[Component.FULL]} if Component.FULL in sources else {}
    try:
        copies = lean(child, lease, length, sources)
    except OutOfUnits:
        lease.release(parent.fence)
        raise
    if apart is not None:
        _hand_over(tree, parent, child, apart)
    # The copies are planned in the next step: until that has settled, their sources must not be used again.
    parent.fence = max(parent.fence, parent.ledger.step + 1)
    return copies


def _bring_apart(parent: Sequence, point: ResumePoint) -> ResumePoint | None:
    """Give a point all its window pages where newer points have some; None if the tree has them."""
    if parent.window_keeper(point) is None:
        return None
    while point.window is None or point.window.end < parent.ledger.layout.pages_for(point.length):
        parent.drop_point(parent.points[parent.points.index(point) + 1])
    return point


def _hand_over(tree: PrefixTree, parent: Sequence, child: Sequence, point: ResumePoint) -> None:
    """Give a checkpoint to the child that continues from it: whole window pages through the tree."""
    assert point.window is not None and child.lease is not None and child.window is not None
    run = point.window
    for older in parent.points[: parent.points.index(point)]:
        if parent.ledger.layout.pages_for(older.length) > run.first:
            parent.drop_point(older)
    parent.points.remove(point)
    run.hold.fence(parent.fence)
    partial = run.hold.split(child.lease.pages - run.first)
    tree.fill_window(child.lease, run)
    child.window.hold.join(partial.move_to(child.holder))
    if point.state is not None:
        point.state.fence(parent.fence)
        child.state = point.state.move_to(child.holder)


def _copy_sources(
    parent: Sequence, length: int, point: ResumePoint | None, page: int
) -> dict[Component, int]:
    """The source of the partly filled page and the state of a child that continues from `length`."""
    layout, lease = parent.ledger.layout, parent.lease
    assert lease is not None
    sources: dict[Component, int] = {}
    if length % layout.page_size:
        if parent.full is not None:
            own = page >= lease.pages
            sources[Component.FULL] = (
                parent.full.units[page - lease.pages] if own else lease.full_units(page)[0]
            )
        if parent.window is not None and (point is None or point.window is None):
            run = parent.window
            own = page >= run.first
            sources[Component.WINDOW] = (
                run.hold.units[page - run.first] if own else lease.window_units(page)[0]
            )
    state = point.state if point is not None else parent.state
    if layout.state and length:
        unit = state.units[0] if state is not None else lease.state_unit(length)
        assert unit is not None, "a sequence at rest has its state or leases it"
        sources[Component.STATE] = unit
    return sources


def leave_history(tree: PrefixTree, sequence: Sequence, rank: int = 0) -> None:
    """Hand everything that was computed to the tree, so that the same history resumes at its exact end.

    The sequence keeps its lease, and is to be closed next.
    """
    layout = sequence.ledger.layout
    assert sequence.mark is None and sequence.planned == sequence.computed, "only a sequence at rest"
    publish(tree, sequence, sequence.computed, rank)
    lease, state = sequence.lease, sequence.state
    assert lease is not None
    if sequence.computed == lease.length:
        if state is not None:
            state.fence(sequence.fence)
            sequence.state = None
            tree.set_state(lease, state)
        return
    assert state is not None or not layout.state, "only a page boundary can have a leased state"
    sequence.state = None
    full = sequence.full.split_front(1) if sequence.full is not None else None
    run = sequence.window
    window = run.hold.split(len(run.hold) - 1) if run is not None else None
    for hold in (full, window, state):
        if hold is not None:
            hold.fence(sequence.fence)
    tree.add_tail(lease, sequence.tokens.packed(lease.length, sequence.computed), full, window, state)
