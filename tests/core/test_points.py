"""Resume points: window pages belong to the newest that needs them, and points are thinned with age."""

import itertools

import pytest

from holdfast.core.layout import Component, named_layout
from holdfast.core.ledger import Hold, Kind
from holdfast.core.points import ResumePoint, give_down, thin
from tests.core.world import PAGE_SIZES, make_ledger


def points_at(*lengths: int, pinned: tuple[int, ...] = ()) -> list[ResumePoint]:
    ledger = make_ledger(named_layout("window", 1))
    holder = ledger.holder(Kind.CHECKPOINT, "chat")
    points = [ResumePoint(length, None, holder) for length in lengths]
    for point in points:
        point.pinned = point.length in pinned
    return points


def release_all(points: list[ResumePoint]) -> None:
    for point in points:
        if point.window is not None:
            point.window.hold.release()


class Pages:
    """Window pages 0, 1, 2, ... of a sequence with a window of `window` tokens."""

    def __init__(self, page_size: int, window: int, count: int) -> None:
        self.layout = named_layout("window", page_size, window)
        self.ledger = make_ledger(self.layout)
        self.pool = self.ledger.pool(Component.WINDOW)
        self.checkpoints = self.ledger.holder(Kind.CHECKPOINT, "chat")
        self.hold: Hold = self.ledger.take(self.pool, count, self.ledger.holder(Kind.TURN, "turn"))
        self.units = list(self.hold.units)

    def point(self, length: int) -> ResumePoint:
        return ResumePoint(length, None, self.checkpoints)

    def kept(self, points: list[ResumePoint]) -> list[tuple[int, ...]]:
        """Page numbers that each point has."""
        return [
            tuple(self.units.index(unit) for unit in p.window.hold.units) if p.window else () for p in points
        ]


def test_pages_go_to_the_newest_point_that_needs_them_and_the_rest_are_freed() -> None:
    pages = Pages(page_size=1, window=3, count=12)
    points = [pages.point(4), pages.point(6)]
    give_down(pages.layout, pages.hold, 0, points, 0)
    assert pages.kept(points) == [(1, 2), (3, 4, 5)]
    assert pages.checkpoints.held[pages.pool.index] == 5
    assert pages.pool.counts()["FREE"] == pages.pool.size - 5
    release_all(points)


def test_a_page_that_two_points_share_belongs_to_the_newer_one() -> None:
    pages = Pages(page_size=4, window=4, count=3)
    points = [pages.point(5), pages.point(7)]
    give_down(pages.layout, pages.hold, 0, points, 0)
    assert pages.kept(points) == [(), (0, 1)]
    release_all(points)


def test_pages_that_no_point_needs_are_freed_behind_the_fence() -> None:
    pages = Pages(page_size=1, window=2, count=6)
    pages.ledger.step = 1
    point = pages.point(100)
    give_down(pages.layout, pages.hold, 0, [point], 1)
    assert point.window is None
    assert pages.pool.counts()["RETIRING"] == 6


def test_a_point_appends_what_follows_the_pages_it_has() -> None:
    pages = Pages(page_size=1, window=4, count=4)
    point = pages.point(4)
    give_down(pages.layout, pages.hold.split_front(2), 0, [point], 0)
    give_down(pages.layout, pages.hold, 2, [point], 0)
    assert pages.kept([point]) == [(0, 1, 2, 3)]
    release_all([point])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_each_point_keeps_exactly_the_pages_of_its_window(page_size: int) -> None:
    window = 2 * page_size + 1
    pages = Pages(page_size, window, count=40)
    lengths = [7 * page_size + 1, 19 * page_size - 1, 31 * page_size]
    points = [pages.point(length) for length in lengths]
    give_down(pages.layout, pages.hold, 0, points, 0)
    for point, kept in zip(points, pages.kept(points), strict=True):
        first = pages.layout.window_first_page(point.length)
        assert kept == tuple(range(first, pages.layout.pages_for(point.length)))
        assert point.window.first == first
        assert point.window.end == kept[-1] + 1
    release_all(points)


def test_a_point_moves_all_it_holds_to_another_holder() -> None:
    layout = named_layout("full+window+state", 4, 4)
    ledger = make_ledger(layout)
    turn, later = ledger.holder(Kind.TURN, "turn"), ledger.holder(Kind.CHECKPOINT, "chat")
    empty, full = (
        ResumePoint(0, None, turn),
        ResumePoint(8, ledger.take(ledger.pool(Component.STATE), 1, turn), turn),
    )
    give_down(layout, ledger.take(ledger.pool(Component.WINDOW), 2, turn), 0, [full], 0)
    for point in (empty, full):
        point.move_to(later)
        assert point.holder is later
    assert turn.held == [0, 0, 0]
    assert later.held == [0, 1, 1]
    full.state.release()
    release_all([full])


def test_thinning_drops_the_point_that_is_missed_least() -> None:
    points = points_at(10, 20, 21, 30)
    assert thin(points, 40) == 2, "one of the two that crowd goes, not one that stands alone"


def test_thinning_leaves_pinned_points_alone() -> None:
    assert thin(points_at(10, 20, pinned=(10, 20)), 40) is None
    assert thin(points_at(10, 20, pinned=(10,)), 40) == 1
    assert thin([], 40) is None


def test_thinned_points_are_dense_near_the_end_and_sparse_at_the_start() -> None:
    points = points_at(*range(8, 1024, 8))
    while len(points) > 10:
        points.pop(thin(points, 1024))
    gaps = [after.length - before.length for before, after in itertools.pairwise(points)]
    assert gaps[0] > 4 * gaps[-1]
    assert points[-1].length > 1024 - 64
