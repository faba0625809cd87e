"""Names of engines: who gets which, when a silent one loses it, and what a table knows that was lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.slots import SETTLE_SECONDS, SILENCE_SECONDS, Slots


def fresh(expected: int = 9) -> Slots:
    slots = Slots(0.0, settle=0.0)
    slots.expect(expected)
    return slots


def test_new_engines_get_the_next_numbers() -> None:
    slots = fresh()
    assert [slots.take(holder, 0.0) for holder in ("a", "b", "c")] == [0, 1, 2]
    assert slots.take("b", 0.0) == 1, "asked again, the same"
    assert slots.addresses() == {}, "none serves yet"


def test_a_successor_takes_the_lowest_name_that_is_free() -> None:
    slots = fresh()
    for number, holder in enumerate("abc"):
        slots.take(holder, 0.0)
        slots.hold(holder, number, f"m:{number}", 0.0)
    slots.release("c")
    slots.release("b")
    assert slots.addresses() == {"engine-0": "m:0", "engine-1": "m:1", "engine-2": "m:2"}, "where it was last"
    assert slots.take("d", 1.0) == 1
    slots.hold("d", 1, "n:7", 1.0)
    assert slots.addresses()["engine-1"] == "n:7"
    assert slots.take("e", 1.0) == 2


def test_a_successor_waits_for_the_name_of_the_one_that_it_replaces() -> None:
    slots = fresh(1)
    slots.take("a", 0.0)
    slots.hold("a", 0, "m:0", 0.0)
    assert slots.take("b", 1.0) is None, "it drains, or is dead and not known to be"
    slots.release("a")
    assert slots.take("b", 1.0) == 0
    assert Slots(0.0, settle=0.0).take("c", 0.0) is None, "nobody has said how many there should be"


def test_a_silent_engine_loses_its_name_and_is_told_so() -> None:
    slots = fresh()
    slots.take("a", 0.0)
    assert slots.hold("a", 0, "m:0", 1.0)
    assert slots.expire(1.0 + SILENCE_SECONDS) == []
    assert slots.take("b", 1.5 + SILENCE_SECONDS) == 0
    assert not slots.hold("a", 0, "m:0", 2.0 + SILENCE_SECONDS)
    slots.release("a")
    assert slots.hold("b", 0, "n:0", 2.0 + SILENCE_SECONDS)


def test_an_engine_that_asks_for_its_name_again_is_heard_of() -> None:
    slots = fresh()
    for now in (0.0, SILENCE_SECONDS, 2 * SILENCE_SECONDS):
        assert slots.take("a", now) == 0
    assert slots.expire(3 * SILENCE_SECONDS) == []


def test_a_table_that_was_lost_listens_first() -> None:
    slots = Slots(100.0)
    slots.expect(2)
    assert slots.take("new", 100.0) is None
    assert slots.hold("old", 0, "m:0", 101.0)
    assert not slots.settled(101.0)
    assert slots.take("new", 100.0 + SETTLE_SECONDS) == 1


def test_names_beyond_the_number_of_engines_are_forgotten_if_nobody_has_them() -> None:
    slots = fresh()
    for number, holder in enumerate("abcd"):
        slots.take(holder, 0.0)
        slots.hold(holder, number, f"m:{number}", 0.0)
    slots.release("b")
    slots.release("d")
    slots.expect(3)
    assert list(slots.addresses()) == ["engine-0", "engine-1", "engine-2"]
    slots.expect(1)
    assert list(slots.addresses()) == ["engine-0", "engine-2"], "those that are held stay"


EVENTS = st.lists(
    st.tuples(st.sampled_from(["take", "hold", "release", "wait"]), st.integers(0, 5)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_a_name_has_one_engine_and_an_engine_one_name(events: list[tuple[str, int]]) -> None:
    slots, now = fresh(), 0.0
    believed: dict[str, int] = {}
    heard: dict[str, float] = {}
    for kind, who in events:
        holder = f"engine {who}"
        if kind == "wait":
            now += 1.0 + who
        elif kind == "take" and holder not in believed:
            number = slots.take(holder, now)
            if number is not None:
                alive = [other for other in believed if now - heard[other] <= SILENCE_SECONDS]
                assert number not in [believed[other] for other in alive]
                believed[holder], heard[holder] = number, now
        elif kind == "hold" and holder in believed:
            if slots.hold(holder, believed[holder], f"m:{who}", now):
                heard[holder] = now
            else:
                assert now - heard[holder] > SILENCE_SECONDS, "nobody loses a name that it holds"
                del believed[holder]
        elif kind == "release":
            slots.release(holder)
            believed.pop(holder, None)
