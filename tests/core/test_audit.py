"""The audit: every kind of fault is found, named and healed, at once and in slices; health is never a fault.

Faults are planted by hand into a world that has all components, resting and running chats, checkpoints,
tails and shared prefixes. Each is looked for by the whole census and by slices.
"""

import gc
import random

import pytest

from holdfast.core.audit import FINDINGS_KEPT, ROWS_PER_SLICE, TRAIL_LENGTH, Audit, Finding
from holdfast.core.layout import Component, named_layout
from holdfast.core.ledger import Kind, OutOfUnits
from holdfast.core.tokens import pack
from tests.core.world import LAYOUTS, PAGE_SIZES, World

FULL, WINDOW, STATE = Component.FULL, Component.WINDOW, Component.STATE
PROMPT = list(range(100, 141))


def busy_world(name: str = "full+window+state", page_size: int = 4) -> World:
    """Resting and running chats, checkpoints, a tail, shared prefixes, and units behind a fence."""
    world = World(named_layout(name, page_size, 7), pages=300, slots=40)
    gone, rest, running, *_ = chats = [world.open(each) for each in ("gone", "rest", "running", "spare")]
    for chat in chats[:3]:
        world.begin(chat, PROMPT, checkpoint=True)
        world.compute(chat)
        world.publish(chat, 40)
        world.say(chat, 1)
        world.compute(chat)
        world.commit(chat)
    world.close(gone, leave=True)
    world.turn(rest, [5] * 9, [6])
    world.begin(running, [7] * 9)
    world.compute(running, 5)
    world.settle(lag=1)
    world.check()
    return world


def chat_named(world: World, name: str):
    return next(chat for chat in world.chats if chat.name == name)


class Planted:
    """A fault: what to do to the world, and what the finding must say. `cure` is what the scheduler does."""

    def __init__(self, kind, holder, healed, plant, cure=lambda world: None, extra=()) -> None:
        self.kind = kind
        self.holder = holder
        self.healed = healed
        self.plant = plant
        self.cure = cure
        self.extra = extra


def take(world: World, component: Component, count: int, name: str):
    pool = world.ledger.pool(component)
    return world.ledger.take(pool, count, world.ledger.holder(Kind.TRANSIT, name))


def drop_hold(world):
    hold = take(world, FULL, 3, "forgetful")
    del hold


def drop_lease(world):
    lease = world.tree.lease_root("tenant", "forgetful")
    del lease


def park_hold(world):
    world.parked = take(world, WINDOW, 2, "parked")


def park_lease(world):
    world.parked = world.tree.lease_root("tenant", "parked")


def share_hold(world):
    chat_named(world, "spare").sequence.spare = chat_named(world, "rest").sequence.state


def unshare_hold(world):
    chat_named(world, "spare").sequence.spare = None


def name_a_unit_twice(world):
    rest, running = chat_named(world, "rest").sequence, chat_named(world, "running").sequence
    rest.full.grant.units[-1] = running.full.units[0]


def free_a_held_unit(world):
    world.ledger.pool(FULL).free.append(chat_named(world, "rest").sequence.full.units[0])


def retire_a_held_unit(world):
    pool = world.ledger.pool(FULL)
    pool.retiring.append((world.ledger.step, [chat_named(world, "rest").sequence.full.units[0]]))
    pool.by_kind[Kind.RETIRING] += 1


def free_a_free_unit(world):
    pool = world.ledger.pool(FULL)
    pool.free.insert(5, pool.free[-1])


def free_a_placeholder(world):
    world.ledger.pool(STATE).free.append(-1)


def hold_a_placeholder(world):
    hold = chat_named(world, "rest").sequence.points[0].state
    hold.grant.units.append(4000)
    hold.pool.count(hold.holder, 1)


def take_back_what_is_kept(world):
    world.ledger.reclaim(chat_named(world, "rest").sequence.state.grant)


def forget_what_was_taken_back(world):
    chat_named(world, "rest").sequence.state = None
    chat_named(world, "rest").sequence.drop_memory()


def lose_a_unit(world):
    world.ledger.pool(WINDOW).free.pop()


def miscount(world):
    world.ledger.pool(WINDOW).by_kind[Kind.TURN] += 1


def leased_node(world, name: str):
    return chat_named(world, name).sequence.lease.record.node


def lock_once_more(world):
    leased_node(world, "rest").leases += 1


def lock_a_state_once_more(world):
    leased_node(world, "rest").state_leases += 1


def lock_a_tail_once_more(world):
    tails = [tail for node in world.tree.forest.nodes() for tail in node.tails.values()]
    tails[0].leases += 1


def lock_a_window_for_ever(world):
    lease = world.tree.lease_root("tenant", "short")
    record = lease.record
    lease.release()
    leased_node(world, "rest").window_leases.add(record)


def keep_a_window_that_is_given_up(world):
    record = chat_named(world, "rest").sequence.lease.record
    assert record in record.node.window_leases and record.window_first < record.pages
    record.window_first = record.pages


def unlock_a_window(world):
    record = chat_named(world, "rest").sequence.lease.record
    record.node.window_leases.remove(record)


def lock_a_state_past_the_end(world):
    """What shortening a lease must not leave behind; every count agrees."""
    lease = world.tree.lease(world.tree.match("tenant", pack(PROMPT), 40), "spare")
    chat_named(world, "spare").sequence.lease = lease
    node = lease.record.node
    lease.shorten(0)
    assert node.state is not None and lease.record.state_node is None
    lease.record.state_node = node
    world.tree.forest.leased[STATE] += not node.state_leases
    node.state_leases += 1


def lock_a_tail_past_the_end(world):
    lease = world.tree.lease(world.tree.match("tenant", pack([*PROMPT, 1]), 42), "spare")
    chat_named(world, "spare").sequence.lease = lease
    tail = lease.record.tail
    lease.shorten(0)
    assert tail is not None and lease.record.tail is None
    lease.record.tail = tail
    tail.leases += 1


def begin_the_window_past_the_end(world):
    record = chat_named(world, "rest").sequence.lease.record
    record.node.window_leases.remove(record)
    record.window_first = record.pages + 1


def forget_to_queue(world):
    """A tail that nobody leases."""
    tail = next(tail for node in world.tree.forest.nodes() for tail in node.tails.values())
    assert not tail.leases
    tail.queued = 0


def forget_to_queue_a_node(world):
    leased_node(world, "rest").queued = 0


def unlock_what_is_leased(world):
    leased_node(world, "rest").leases -= 1


def add_a_page(world):
    chat_named(world, "rest").sequence.pages += 1


def drop_rest(world):
    world.close(chat_named(world, "rest"))


FAULTS = {
    "a dropped hold": Planted("dropped hold", "TRANSIT forgetful", "reclaimed", drop_hold),
    "a dropped lease": Planted("dropped lease", "forgetful", "unlocked", drop_lease),
    "a parked hold": Planted("unclaimed", "TRANSIT parked", "reclaimed", park_hold),
    "a parked lease": Planted("lock without a lessee", "parked", "unlocked", park_lease),
    "a hold with two owners": Planted(
        "claimed twice", "SESSION rest", "its owners are to be dropped", share_hold, unshare_hold
    ),
    "a unit in two holds": Planted(
        "claimed twice",
        "SESSION rest, TURN turn of running",
        "quarantined",
        name_a_unit_twice,
        extra=["lost"],
    ),
    "a held unit that is free": Planted(
        "claimed while free", "SESSION rest", "quarantined", free_a_held_unit
    ),
    "a held unit that retires": Planted(
        "claimed while free", "SESSION rest", "quarantined", retire_a_held_unit
    ),
    "a unit that is free twice": Planted(
        "claimed while free", "the free list", "quarantined", free_a_free_unit
    ),
    "a placeholder in the free list": Planted("foreign unit", "the free list", "removed", free_a_placeholder),
    "a placeholder in a hold": Planted("foreign unit", "CHECKPOINT rest", "removed", hold_a_placeholder),
    "a hold that was taken back": Planted(
        "claimed while free",
        "SESSION rest",
        "its owners are to be dropped",
        take_back_what_is_kept,
        forget_what_was_taken_back,
    ),
    "a lost unit": Planted("lost", "nobody", "reclaimed", lose_a_unit),
    "a wrong counter": Planted("counter", "ledger", "recounted", miscount),
    "a lock too many": Planted("lock without a lessee", "rest", "recounted", lock_once_more),
    "a state lock too many": Planted("lock without a lessee", "rest", "recounted", lock_a_state_once_more),
    "a tail lock too many": Planted("lock without a lessee", "rest", "recounted", lock_a_tail_once_more),
    "a window lock of a lease that is gone": Planted(
        "lock without a lessee", "rest", "recounted", lock_a_window_for_ever
    ),
    "a window lock that was given up": Planted(
        "lock without a lessee", "rest", "recounted", keep_a_window_that_is_given_up
    ),
    "a window lock too few": Planted("lock without a lessee", "rest", "recounted", unlock_a_window),
    "a state lock past the lease's end": Planted(
        "lock without a lessee", "spare", "unlocked", lock_a_state_past_the_end
    ),
    "a tail lock past the lease's end": Planted(
        "lock without a lessee", "spare", "unlocked", lock_a_tail_past_the_end
    ),
    "a window that begins past the lease's end": Planted(
        "lock without a lessee", "rest", "unlocked", begin_the_window_past_the_end
    ),
    "a tail that is not queued": Planted("not queued", "TREE tenant", "queued", forget_to_queue),
    "a node that is not queued": Planted("not queued", "TREE tenant", "queued", forget_to_queue_a_node),
    "a lock too few": Planted("lock without a lessee", "rest", "recounted", unlock_what_is_leased),
    "books that do not add up": Planted(
        "books", "SESSION rest", "its memory is to be dropped", add_a_page, drop_rest
    ),
}
BY_NAME = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())


def expect(found: list[Finding], fault: Planted, step: int) -> None:
    kinds = [finding.kind for finding in found]
    assert fault.kind in kinds, [str(finding) for finding in found]
    assert set(kinds) <= {fault.kind, *fault.extra}, [str(finding) for finding in found]
    finding = found[kinds.index(fault.kind)]
    assert fault.holder in finding.holder
    assert finding.healed == fault.healed
    assert finding.step == step
    assert finding.holder in str(finding)


@pytest.mark.no_cover
@BY_NAME
def test_the_census_finds_names_and_heals(fault: Planted) -> None:
    world = busy_world()
    fault.plant(world)
    found = world.census()
    expect(found, fault, world.ledger.step)
    assert world.audit.findings == found
    fault.cure(world)
    world.check()
    finish(world)


@BY_NAME
def test_slices_find_it_too_within_two_rounds(fault: Planted) -> None:
    world = busy_world()
    fault.plant(world)
    found, rounds = [], 0
    while rounds < 2 and not found:
        found = world.audit.slice(9)
        rounds += world.audit.between_rounds
    expect(found, fault, world.ledger.step)
    fault.cure(world)
    world.check()
    finish(world)


def finish(world: World) -> None:
    """Close everything: what is not free is in quarantine, and nothing more is found."""
    for chat in list(world.chats):
        if chat.running:
            world.rollback(chat)
        world.close(chat)
    world.tree.flush()
    world.plan()
    world.settle()
    world.check()
    for pool in world.ledger.pools.values():
        assert sorted(pool.free + pool.quarantine) == list(range(pool.size))


def test_a_lease_of_what_was_evicted_is_found_with_its_owner() -> None:
    world = busy_world()
    rest, running = chat_named(world, "rest").sequence, chat_named(world, "running")
    node = rest.lease.record.node
    tail = next(iter(node.tails.values()))
    world.rollback(running)
    world.close(running)
    node.leases -= 1
    world.tree.forest.remove_tail(tail)
    world.tree.forest.remove(node)
    node.leases += 1
    finding = world.census()[0]
    assert (finding.kind, finding.holder, finding.owners) == ("claimed while free", "rest", [rest])
    assert "evicted" in finding.detail


def test_a_lease_of_a_tail_that_was_evicted_is_found() -> None:
    world = busy_world()
    node = chat_named(world, "rest").sequence.lease.record.node
    key = next(iter(node.tails))
    match = world.tree.match("tenant", pack([*PROMPT, 1]), 42)
    assert match.tail is node.tails[key]
    spare = chat_named(world, "spare").sequence
    spare.lease = world.tree.lease(match, "spare")
    match.tail.leases -= 1
    world.tree.forest.remove_tail(match.tail)
    match.tail.leases += 1
    kinds = {(finding.kind, finding.holder) for finding in world.census()}
    assert ("claimed while free", "spare") in kinds


def test_a_wrong_count_of_states_in_the_tree_is_set_right() -> None:
    world = busy_world()
    counted = world.tree.forest.states
    world.tree.forest.states += 2
    (finding,) = world.census()
    assert (finding.kind, finding.healed, world.tree.forest.states) == ("counter", "recounted", counted)
    assert f"{counted + 2} states counted in the tree, {counted} there" in finding.detail
    world.check()


@pytest.mark.parametrize("component", Component)
def test_a_wrong_count_of_leased_units_is_set_right(component: Component) -> None:
    world = busy_world()
    forest, node = world.tree.forest, leased_node(world, "rest")
    counted, locks = list(forest.leased), node.locks
    forest.leased[component] += 2
    node.locks += 3
    (finding,) = world.census()
    assert (finding.kind, finding.healed) == ("counter", "recounted")
    assert (forest.leased, node.locks) == (counted, locks)
    assert f"units counted as leased, {counted} are" in finding.detail
    world.check()


def test_a_finding_carries_units_and_the_last_transitions_of_its_holder() -> None:
    world = busy_world()
    parked = take(world, FULL, 2, "parked")
    for _ in range(TRAIL_LENGTH):
        parked.grow(1)
    units = list(parked.units)
    (finding,) = world.census()
    assert finding.units == units
    assert finding.pool == "full on device"
    assert "test_audit.py:" in finding.detail
    assert len(finding.trail) == TRAIL_LENGTH
    assert all("grow" in line and "TRANSIT parked" in line for line in finding.trail)
    assert finding.trail[0].startswith(f"step {world.ledger.step}: ")


def test_a_reclaimed_hold_waits_for_the_steps_in_flight() -> None:
    world = busy_world()
    world.plan()
    park_hold(world)
    world.census()
    assert world.ledger.pool(WINDOW).counts()["RETIRING"] >= 2
    world.settle()
    assert world.ledger.pool(WINDOW).counts()["RETIRING"] == 0
    world.check()


def test_a_unit_with_two_holders_is_never_handed_out_again() -> None:
    world = busy_world()
    name_a_unit_twice(world)
    doubtful = chat_named(world, "running").sequence.full.units[0]
    world.census()
    for name in ("rest", "running", "spare"):
        chat = chat_named(world, name)
        if chat.running:
            world.rollback(chat)
        world.close(chat)
        world.check()
    world.tree.flush()
    world.plan()
    world.settle()
    world.check()
    pool = world.ledger.pool(FULL)
    assert doubtful in pool.quarantine
    assert doubtful not in pool.free
    assert len(pool.free) + len(pool.quarantine) == pool.size


def test_a_placeholder_that_comes_back_stays_out_of_the_free_list() -> None:
    world = busy_world()
    hold_a_placeholder(world)
    assert [finding.kind for finding in world.census()] == ["foreign unit"]
    world.check()
    world.close(chat_named(world, "rest"))
    world.check()
    pool = world.ledger.pool(STATE)
    assert all(0 <= unit < pool.size for unit in pool.free)


def test_findings_are_kept_but_not_without_end() -> None:
    world = World(named_layout("dense", 4), pages=8)
    for _ in range(FINDINGS_KEPT + 3):
        park_hold_of_dense(world)
        world.census()
    assert len(world.audit.findings) == FINDINGS_KEPT
    assert all(finding.kind == "unclaimed" for finding in world.audit.findings)


def park_hold_of_dense(world: World) -> None:
    world.parked = take(world, FULL, 1, "parked")
    world.settle()


def test_a_census_notes_when_it_was_last_made() -> None:
    world = busy_world()
    world.plan()
    world.check()
    assert world.audit.last_full_step == world.ledger.step


# --- books ------------------------------------------------------------------------------------------


def spoil(sequence, **values) -> None:
    for name, value in values.items():
        setattr(sequence, name, value)


BOOKS = {
    "lies past planned": lambda sequence: spoil(sequence, computed=sequence.planned + 1),
    "pages are held where": lambda sequence: spoil(sequence, pages=sequence.pages + 1),
    "own full pages, but": lambda sequence: sequence.full.shrink(1),
    "window pages end at": lambda sequence: sequence.window.hold.shrink(1),
    "are gone, but": lambda sequence: (
        sequence.thin_points(0),
        sequence.window.hold.shrink_front(1),
        spoil(sequence.window, first=sequence.window.first + 1),
    ),
    "is kept, but nothing below": lambda sequence: (
        sequence.window.hold.grow(1),
        spoil(sequence.window, first=sequence.window.first - 1),
    ),
    "no state at": lambda sequence: (sequence.state.release(), spoil(sequence, state=None)),
}


@pytest.mark.parametrize(("words", "plant"), BOOKS.items(), ids=BOOKS.keys())
def test_books_that_do_not_add_up_say_what_is_wrong(words: str, plant) -> None:
    world = World(named_layout("full+window+state", 4, 7))
    chat = world.open("wrong")
    world.turn(chat, PROMPT, [1])
    world.turn(chat, PROMPT, [1])
    for point in chat.sequence.points:
        point.pinned = False
    plant(chat.sequence)
    found = [finding for finding in world.census() if finding.kind == "books"]
    assert len(found) == 1
    assert words in found[0].detail
    assert found[0].holder == "SESSION wrong"
    assert found[0].owners == [chat.sequence]
    assert found[0].trail


def test_a_sequence_whose_memory_is_away_answers_for_its_lengths_alone() -> None:
    world = World(named_layout("full+window+state", 4, 7))
    chat = world.open()
    world.turn(chat, PROMPT, [1])
    chat.sequence.away = True
    chat.sequence.pages += 1
    world.check()
    chat.sequence.computed += 1
    assert [finding.kind for finding in world.census()] == ["books"]


# --- health -----------------------------------------------------------------------------------------


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_healthy_states_never_produce_a_finding(name: str, page_size: int) -> None:
    world = busy_world(name, page_size)
    world.check()
    rounds = 0
    while rounds < 2:
        assert world.audit.slice(33) == []
        rounds += world.audit.between_rounds
    world.finish()


@pytest.mark.no_cover
@pytest.mark.parametrize("sessions", [0, 1, 300])
def test_the_idle_census_is_exact_however_many_sessions_are_open(sessions: int) -> None:
    world = World(named_layout("full+window+state", 16, 7), pages=1500, slots=900)
    for _ in range(sessions):
        world.turn(world.open(), PROMPT[:21], [1])
    world.check()
    held = sum(pool.size - len(pool.free) for pool in world.ledger.pools.values())
    assert (held == 0) == (sessions == 0)
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 40, 400])
def test_slices_over_a_changing_world_give_no_false_alarm(name: str, budget: int) -> None:
    world = World(named_layout(name, 4, 7), pages=120, slots=16)
    draw = random.Random(budget)
    audit = Audit(world.ledger, world.tree, lambda: [chat.sequence for chat in world.chats])
    rounds = 0
    for number in range(150):
        try:
            chat = draw.choice(world.chats) if world.chats else world.open()
            world.turn(chat, PROMPT[: draw.randrange(1, 30)], [number], checkpoint=True)
            if draw.random() < 0.3:
                world.turn(world.fork(chat, draw.choice(chat.ends)), [number], [])
            if draw.random() < 0.3:
                world.close(draw.choice(world.chats), leave=draw.random() < 0.5)
        except OutOfUnits:
            for chat in list(world.chats):
                if chat.running:
                    world.rollback(chat)
                world.close(chat)
            world.tree.flush()
        world.settle(lag=draw.randrange(2))
        assert audit.slice(budget) == []
        rounds += audit.between_rounds
    assert rounds > 2 or budget == 1
    world.finish()


def test_running_rows_pay_for_slices_and_drops_are_heard_at_once() -> None:
    world = busy_world()
    audit = world.audit
    assert audit.tick(1) == []
    drop_hold(world)
    drop_lease(world)
    assert [finding.kind for finding in audit.tick(1)] == ["dropped hold", "dropped lease"]
    assert len(audit.findings) == 2
    assert audit.between_rounds, "nothing else was looked at yet"
    park_hold(world)
    found = []
    for _ in range(100):
        found += audit.tick(ROWS_PER_SLICE)
    assert [finding.kind for finding in found] == ["unclaimed"]


def test_a_hold_that_a_cycle_kept_alive_is_found_either_way() -> None:
    world = busy_world()

    class Knot:
        def __init__(self) -> None:
            self.hold = take(world, FULL, 1, "knot")
            self.itself = self

    gc.collect()
    gc.disable()
    try:
        Knot()
        assert [finding.kind for finding in world.census()] == ["unclaimed"]
        gc.collect()
        world.check()
    finally:
        gc.enable()
