"""What makes a part of the prefix tree younger: each use, in the order in which parts are evicted.

Candidates of the same age go in the order in which they were offered; the tests offer them in the other one.
"""

from holdfast.core.layout import Component
from tests.core.grove import Grove

A, B = [1, 2, 3, 4], [5, 6, 7, 8]


def left(grove: Grove) -> set[int]:
    """The first tokens of the nodes that are left."""
    return {memoryview(node.key).cast("I")[0] for node in grove.tree.forest.nodes() if node.key}


def evict_one(grove: Grove) -> set[int]:
    """Evict one page and tell what is left."""
    assert grove.tree.evict(Component.FULL, 1) == 1
    grove.check()
    return left(grove)


def test_what_was_moved_in_first_goes_first() -> None:
    grove = Grove("dense")
    first, second = grove.insert(A), grove.insert(B)
    grove.release(second)
    grove.release(first)
    assert evict_one(grove) == {5}
    grove.finish()


def test_each_look_up_makes_its_path_the_youngest() -> None:
    grove = Grove("dense")
    first, second = grove.insert(A), grove.insert(B)
    grove.release(second)
    grove.release(first)
    assert (grove.match(B), grove.match(A)) == (4, 4)
    assert evict_one(grove) == {1}
    grove.finish()


def test_two_look_ups_are_not_of_the_same_age() -> None:
    grove = Grove("dense")
    grove.add(A)
    grove.add(B)
    assert (grove.match(A), grove.match(B)) == (4, 4)
    assert evict_one(grove) == {5}
    grove.finish()


def test_moving_in_what_is_there_makes_it_younger() -> None:
    grove = Grove("dense")
    grove.add(A)
    grove.add(B)
    grove.add(A)
    assert evict_one(grove) == {1}
    grove.finish()


def test_a_tail_is_younger_than_what_came_before_it() -> None:
    grove = Grove("dense")
    first, second = grove.insert(B), grove.insert(A)
    grove.add_tail(first, [9])
    grove.release(second)
    assert evict_one(grove) == {5}
    assert sum(len(node.tails) for node in grove.tree.forest.nodes()) == 1
    grove.release(first)
    grove.finish()


def test_a_look_up_that_ends_in_a_tail_makes_the_tail_younger() -> None:
    grove = Grove("dense")
    lease = grove.insert(A)
    grove.add_tail(lease, [7])
    grove.add_tail(lease, [9])
    assert grove.match([*A, 7]) == 5
    assert grove.tree.evict(Component.FULL, 1) == 1
    assert (grove.match([*A, 7]), grove.match([*A, 9])) == (5, 4)
    grove.release(lease)
    grove.finish()


def test_both_parts_of_a_run_that_is_cut_are_as_old_as_ranked_and_as_fenced_as_it_was() -> None:
    grove = Grove("window")
    grove.release(grove.insert([*A, *B], rank=1), fence=1)
    (whole,) = (node for node in grove.tree.forest.nodes() if node.parent is not None)
    before = (whole.used, whole.rank, whole.fence)
    assert before == (1, 1, 1)
    grove.tree.forest.split(whole, 4)
    assert [(n.start, n.used, n.rank, n.fence) for n in (whole.parent, whole)] == [(0, *before), (4, *before)]
    grove.finish()
