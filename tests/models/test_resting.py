"""States at rest in eight bits: which are awake, and that a turn begins from what rests in any case."""

import random

import pytest

from holdfast.models.resting import Places, RestingStates, RowState


class Store:
    """Running slots and places with numbers in them; rest rounds to tens."""

    def __init__(self, slots: int, places: int) -> None:
        self.running: list[float] = [float("nan")] * slots
        self.places: list[float] = [float("nan")] * places
        self.rests = 0
        self.states = RestingStates(slots, self.rest, self.wake)

    def rest(self, states: Places) -> None:
        self.rests += len(states)
        for slot, place in states:
            self.places[place] = round(self.running[slot], -1)

    def wake(self, states: Places) -> None:
        for place, slot in states:
            self.running[slot] = self.places[place]

    def step(self, *rows: tuple[int | None, int, int, float]) -> None:
        """Rows of (source, destination, turn, what it adds)."""
        found = self.states.begin([RowState(*row[:3]) for row in rows])
        written = {}
        for slots, (_, _, _, more) in zip(found, rows, strict=True):
            assert slots is not None
            read, write = slots
            assert write not in written, "two rows share a slot"
            written[write] = (0.0 if read < 0 else self.running[read]) + more
        for slot, value in written.items():
            self.running[slot] = value

    def value(self, place: int) -> float:
        self.states.settle([place])
        return self.places[place]


def test_within_a_turn_nothing_is_rounded() -> None:
    store = Store(2, 4)
    store.step((None, 0, 1, 1.0))
    for _ in range(9):
        store.step((0, 0, 1, 1.0))
    store.step((0, 2, 1, 4.0))  # another place, the same turn
    assert store.rests == 0
    assert store.value(2) == 10.0 and store.running[1] == 14.0


def test_a_state_that_has_not_changed_is_put_to_rest_once() -> None:
    store = Store(1, 4)
    store.step((None, 0, 1, 14.0))
    assert store.value(0) == store.value(0) == 10.0
    store.step((0, 1, 2, 1.0))
    assert store.rests == 1, "neither when it is read again nor when its slot is needed"


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_turn_begins_from_what_rests(slots: int) -> None:
    """The state before it is still awake, or is not: 14 rests as 10 in any case."""
    store = Store(slots, 4)
    store.step((None, 0, 1, 14.0))
    if slots == 1:
        store.step((None, 3, 9, 1.0))  # takes the only slot
    store.step((0, 1, 2, 2.0))
    assert store.running[store.states._awake[1].slot] == 12.0
    assert store.value(0) == 10.0, "what it began from is unchanged"


def test_a_place_that_others_have_written_is_read_again() -> None:
    store = Store(2, 4)
    store.step((None, 0, 1, 14.0))
    store.states.forget([0])
    store.places[0] = 50.0
    store.step((0, 1, 2, 1.0))
    assert store.running[store.states._awake[1].slot] == 51.0
    assert store.value(0) == 50.0


def test_a_turn_that_waited_goes_on_from_what_rests() -> None:
    store = Store(1, 4)
    store.step((None, 0, 1, 14.0))
    store.step((None, 1, 2, 5.0))
    store.step((0, 0, 1, 1.0))
    assert store.value(0) == 10.0 and store.running[0] == 11.0


def test_rows_without_a_state_and_too_many_rows() -> None:
    store = Store(2, 4)
    assert store.states.begin([None, RowState(None, 1, 1)]) == [None, (-1, 0)]
    with pytest.raises(AssertionError, match="more states"):
        store.states.begin([RowState(None, place, 1) for place in range(3)])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_computed_does_not_depend_on_the_running_slots(seed: int) -> None:
    """Sessions that run turns of several steps, with as many running slots as rows, or with plenty."""
    results = []
    for slots in (3, 40):
        chance = random.Random(seed)
        store = Store(slots, 20)
        marks: dict[int, int | None] = dict.fromkeys(range(6))
        free, turn = list(range(20)), 0
        for _ in range(30):
            running = chance.sample(sorted(marks), 3)
            places = {}
            for session in running:
                turn += 1
                places[session] = (free.pop(0), turn)
            for step in range(chance.randint(1, 4)):
                store.step(
                    *(
                        (marks[session] if step == 0 else place, place, number, float(chance.randint(1, 30)))
                        for session, (place, number) in places.items()
                    )
                )
            for session, (place, _) in places.items():
                old = marks[session]
                if chance.random() < 0.2:  # aborted: the mark stays
                    free.append(place)
                else:
                    marks[session] = place
                    if old is not None:
                        free.append(old)
        results.append([None if place is None else store.value(place) for place in marks.values()])
    assert results[0] == results[1]
