"""The eviction queue: least recently used first, lower ranks before higher, and only what may go."""

import pytest

from holdfast.core.eviction import ENTRIES_MIN, EvictionQueue
from tests.core.driver import LAYOUTS, Driver, prompt


class Member:
    """Something that can be evicted while it is free."""

    def __init__(self, used: int, rank: int = 0) -> None:
        self.used = used
        self.rank = rank
        self.queued = 0
        self.free = True


def queue_of(*members: Member) -> EvictionQueue[Member]:
    queue: EvictionQueue[Member] = EvictionQueue(2, lambda member: member.free)
    for member in members:
        queue.offer(member)
    return queue


def drain(queue: EvictionQueue[Member]) -> list[Member]:
    found = []
    while (member := queue.pop()) is not None:
        found.append(member)
    return found


def test_the_least_recently_used_goes_first() -> None:
    old, middle, new = Member(1), Member(2), Member(3)
    assert drain(queue_of(middle, new, old)) == [old, middle, new]


def test_using_a_member_again_moves_it_back_without_telling_the_queue() -> None:
    first, second = Member(1), Member(2)
    queue = queue_of(first, second)
    first.used = 3
    assert drain(queue) == [second, first]


def test_lower_ranks_go_first_whenever_they_were_used() -> None:
    session, prompt = Member(1, rank=1), Member(9)
    assert drain(queue_of(session, prompt)) == [prompt, session]


def test_a_raised_rank_is_noticed_when_its_turn_comes() -> None:
    first, second = Member(1), Member(2)
    queue = queue_of(first, second)
    first.rank = 1
    assert drain(queue) == [second, first]


def test_what_may_not_go_is_neither_queued_nor_popped() -> None:
    locked, later = Member(1), Member(2)
    locked.free = False
    queue = queue_of(locked, later)
    assert locked.queued == 0
    later.free = False
    assert queue.pop() is None
    assert later.queued == 0
    later.free = True
    queue.offer(later)
    assert queue.pop() is later


def test_a_member_is_queued_once_and_other_bits_are_left_alone() -> None:
    member = Member(1)
    member.queued = 4
    queue = queue_of(member, member)
    assert member.queued == 6
    assert drain(queue) == [member]
    assert member.queued == 4


def test_members_of_the_same_age_go_in_the_order_of_their_coming() -> None:
    members = [Member(1) for _ in range(5)]
    assert drain(queue_of(*members)) == members


def test_those_that_are_gone_do_not_stay_queued_for_ever() -> None:
    stays, queue = [Member(used) for used in range(1, 40)], queue_of()
    for used, member in enumerate(stays):
        queue.offer(member)
        for _ in range(100):
            gone = Member(used)
            queue.offer(gone)
            gone.free = False
    assert len(queue._entries) <= ENTRIES_MIN
    assert drain(queue) == stays


def test_one_that_could_not_go_while_the_queue_was_swept_is_offered_again() -> None:
    locked, others = Member(1), [Member(2) for _ in range(ENTRIES_MIN)]
    queue = queue_of(locked, *others[:-1])
    locked.free = False
    queue.offer(others[-1])
    assert not locked.queued and all(member.queued for member in others)
    locked.free = True
    queue.offer(locked)
    assert drain(queue) == [locked, *others]


def test_a_member_that_comes_up_while_the_queue_is_full_is_put_back() -> None:
    members = [Member(used) for used in range(1, ENTRIES_MIN + 1)]
    queue = queue_of(*members)
    members[0].used = ENTRIES_MIN + 1
    queue._entries_max = ENTRIES_MIN - 1
    assert drain(queue) == [*members[1:], members[0]]


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_leaves_the_tree_for_one_component_is_forgotten_by_the_others(layout: str) -> None:
    for pages, slots in ((3000, 12), (40, 3000)):
        driver = Driver(layout, 4, pages=pages, slots=slots, strict=False)
        for seed in range(200):
            driver.request((seed, *prompt(10, seed)), 2)
            driver.run()
        for queue in driver.registry.tree.forest.candidates.queues["red"].values():
            gone = [entry for entry in queue._entries if not queue._evictable(entry[3])]
            assert len(gone) < ENTRIES_MIN
