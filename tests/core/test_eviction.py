"""The eviction queue: least recently used first, lower ranks before higher, and only what may go."""

from holdfast.core.eviction import EvictionQueue


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
