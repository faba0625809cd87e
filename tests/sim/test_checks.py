"""Every check of the simulation can fail: the device, the reference, the inspection, the line to a crash."""

from collections.abc import Callable

import pytest

from holdfast.core.layout import Component, MemoryLayout, Tier
from holdfast.core.ledger import Ledger
from holdfast.core.plan import Row, TableChange, UnitCopy
from holdfast.core.planner import Planner
from holdfast.core.registry import Plan
from holdfast.core.session import Session
from holdfast.core.turn import Turn, TurnRequest
from holdfast.sim.content import EMPTY, History, content_of, extend, next_token, stops
from holdfast.sim.device import SimDevice, WrongContent
from holdfast.sim.found import Crashed, Found, assertions_of_the_core
from holdfast.sim.reference import Conversation, Mismatch
from holdfast.sim.runner import Options, simulate
from holdfast.sim.world import Setup, World

LAYOUT = MemoryLayout(2, full=True, window=3, state=True)
TOKENS = [4, 7, 1, 9, 2]


class Bench:
    """A device with one or two sequences, and rows made by hand."""

    def __init__(self) -> None:
        sizes = {(component, Tier.DEVICE): 16 for component in LAYOUT.components}
        self.ledger = Ledger(LAYOUT, sizes)
        self.logs: dict[int, list[int]] = {1: list(TOKENS), 2: list(TOKENS)}
        self.device = SimDevice(LAYOUT, 50, self.logs.get)
        self.step = 0
        self.sessions = {
            number: Session(self.ledger, f"s{number}", "red", number, 0.0, None) for number in (1, 2)
        }

    def plan(
        self, number: int, start: int, count: int, units: list[int], state: tuple[int | None, int]
    ) -> Plan:
        """A plan of one row that computes known tokens through a fresh table."""
        self.step += 1
        plan: Plan = Plan(self.step)
        holder = self.sessions[number].holder
        turn = Turn(TurnRequest("t1", (1,), 1), f"s{number}", 1, 0.0, holder)
        table = TableChange(0, units, 0, units)
        row: Row[Turn] = Row(turn, number, start, count, TOKENS[start : start + count], True, table)
        row.state = state
        plan.rows.append(row)
        return plan

    def compute(self, plan: Plan) -> None:
        """Let a plan run to its end."""
        self.device.announce(plan)
        self.device.run(plan)
        self.device.settled(plan)


def test_a_row_reads_back_what_earlier_rows_wrote() -> None:
    bench = Bench()
    bench.compute(bench.plan(1, 0, 3, [3, 5], (None, 0)))
    bench.compute(bench.plan(1, 3, 2, [3, 5, 6], (0, 1)))
    assert bench.device.read_unit((Component.FULL, Tier.DEVICE), 5) == [
        content_of(TOKENS[:3]),
        content_of(TOKENS[:4]),
    ]
    assert bench.device.read_unit((Component.STATE, Tier.DEVICE), 1) == [content_of(TOKENS)]


@pytest.mark.parametrize(
    ("units", "state", "what"),
    [
        ([3, 4, 6], (0, 1), "full unit 4 is not what was written at 2"),
        ([4, 5, 6], (0, 1), "full unit 4 is not what was written at 0"),
        ([3, 5, 6], (2, 1), "state slot 2 is not the state at 3 tokens"),
        ([3, 5, 6], (None, 1), "state slot None is not the state at 3 tokens"),
        ([3, 5], (0, 1), "page 2 is missing in its table"),
    ],
)
def test_a_row_with_a_wrong_table_or_state_is_told(
    units: list[int], state: tuple[int | None, int], what: str
) -> None:
    bench = Bench()
    bench.compute(bench.plan(1, 0, 3, [3, 5], (None, 0)))
    with pytest.raises(WrongContent, match=what):
        bench.compute(bench.plan(1, 3, 2, units, state))


def test_a_row_of_another_history_is_told() -> None:
    bench = Bench()
    bench.compute(bench.plan(1, 0, 3, [3, 5], (None, 0)))
    bench.logs[1][1] = 8
    with pytest.raises(WrongContent, match="not what was written at 1"):
        bench.compute(bench.plan(1, 3, 2, [3, 5, 6], (0, 1)))


def test_a_row_of_a_sequence_that_is_gone_is_told() -> None:
    bench = Bench()
    del bench.logs[1]
    with pytest.raises(WrongContent, match="gone"):
        bench.compute(bench.plan(1, 0, 3, [3, 5], (None, 0)))


def test_a_unit_in_flight_must_not_be_handed_out() -> None:
    bench = Bench()
    first = bench.plan(1, 0, 3, [3, 5], (None, 0))
    bench.device.announce(first)
    with pytest.raises(WrongContent, match="unit 5 is handed out while step 1"):
        bench.device.announce(bench.plan(2, 0, 2, [5], (None, 1)))
    bench.device.run(first)
    bench.device.settled(first)
    bench.compute(bench.plan(2, 0, 2, [5], (None, 1)))


def test_a_step_that_fails_half_way_spoils_what_it_was_to_write() -> None:
    bench = Bench()
    bench.compute(bench.plan(1, 0, 3, [3, 5], (None, 0)))
    failed = bench.plan(1, 3, 1, [3, 5], (0, 0))
    failed.copies.append(UnitCopy(Component.FULL, 3, 9))
    failed.copied.append(bench.sessions[1])
    bench.device.announce(failed)
    bench.device.spoil(failed)
    bench.device.settled(failed)
    assert bench.device.read_unit((Component.FULL, Tier.DEVICE), 5) == [content_of(TOKENS[:3]), -1]
    assert bench.device.read_unit((Component.FULL, Tier.DEVICE), 9) == [-1, -1]
    with pytest.raises(WrongContent, match="state slot 0"):
        bench.compute(bench.plan(1, 3, 1, [3, 5], (0, 1)))


def test_histories_follow_cuts_and_changes() -> None:
    history = History()
    for tokens in ([1, 2, 3], [1, 2], [1, 2, 5, 6], [9], []):
        assert history.follow(tokens) == [content_of(tokens[:length]) for length in range(len(tokens) + 1)]


# --- the reference ------------------------------------------------------------------------------------


def test_a_token_that_the_model_does_not_say_is_told() -> None:
    talk = Conversation("s1", 50)
    talk.begin("t1", (1, 2))
    right = next_token(content_of([1, 2]), 50)
    talk.hear([right])
    with pytest.raises(Mismatch, match="token 3"):
        talk.hear([(next_token(content_of([1, 2, right]), 50) + 1) % 50])


def test_a_finish_for_the_wrong_reason_is_told() -> None:
    talk = Conversation("s1", 50)
    talk.begin("t1", (1, 2))
    reason = "length" if stops(content_of([1, 2])) else "stop"
    with pytest.raises(Mismatch, match="finished"):
        talk.finish(reason)


def test_an_abort_that_nobody_asked_for_is_told() -> None:
    bench = Bench()
    talk = Conversation("s1", 50)
    request = TurnRequest("t1", (1, 2), 3)
    talk.begin("t1", request.tokens)
    talk.planned(0, 0)
    turn = Turn(request, "s1", 1, 0.0, bench.sessions[1].holder)
    with pytest.raises(Mismatch, match="had not asked"):
        talk.interrupted("aborted", "abort", turn)
    talk.ask_to_end(None)
    talk.interrupted("aborted", "abort", turn)
    assert (talk.tokens, talk.boundaries, talk.turn_id) == ([], [], None)


# --- findings and crashes -----------------------------------------------------------------------------


def raising(error: Exception) -> Callable[..., None]:
    """Something that raises, outside the core."""

    def fail(*_arguments: object) -> None:
        raise error

    return fail


def test_an_assertion_of_the_core_is_a_finding_that_names_its_session() -> None:
    bench = Bench()
    session = bench.sessions[1]
    with pytest.raises(Found) as found, assertions_of_the_core():
        session.on("admit")
    assert (found.value.kind, found.value.holder) == ("assertion", "s1")
    with pytest.raises(Found) as found, assertions_of_the_core():
        session.sequence.commit(session.holder, session.checkpoints)
    assert found.value.holder == "SESSION s1"
    hold = bench.ledger.take(bench.ledger.pool(Component.FULL), 1, session.holder)
    hold.release()
    with pytest.raises(Found, match="DeadHold"), assertions_of_the_core():
        hold.release()


@pytest.mark.parametrize("error", [AssertionError("outside the core"), KeyError("x"), ValueError("y")])
def test_everything_else_is_a_crash(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "fill", raising(error))
    with pytest.raises(Crashed) as crash:
        simulate(Options(7, 500, workloads=("mix",)))
    assert crash.value.__cause__ is error
    assert crash.value.replay == " --world 0"


def test_the_inspection_reads_what_no_row_reads() -> None:
    """A cell of every unit that anybody holds is spoilt in turn: each is found, with whom it belongs to."""
    world = World(Setup(5, "full+window+state", 3, "mix", 0.0))
    world.run(300)
    noticed: list[tuple[int, Found]] = []
    for pool, units in world.device.memory.items():
        held = {
            unit
            for grant in world.ledger.live.values()
            if grant.pool is world.ledger.pools.get(pool) and grant.holder.kind.name != "TRANSIT"
            for unit in grant.units
        }
        for unit in held & units.keys():
            before = list(units[unit])
            if before[0] == -1:
                continue
            units[unit] = [extend(EMPTY, 1), *before[1:]]
            try:
                world.inspection.everything()
            except Found as found:
                noticed.append((unit, found))
            units[unit] = before
    assert len(noticed) > 20
    assert all(found.kind == "content" and f"unit {unit} " in found.detail for unit, found in noticed)
    world.inspection.everything()


def test_a_world_that_keeps_a_unit_is_not_closed_down_cleanly() -> None:
    world = World(Setup(5, "dense", 3, "mix", 0.0))
    world.run(200)
    pool = world.ledger.pool(Component.FULL)
    while not pool.free:
        world.run(1)
    holder = world.clients.scheduler.registry.sessions[next(iter(world.clients.sessions))].holder
    kept = world.ledger.take(pool, 1, holder)
    with pytest.raises(Found) as found:
        world.close_down()
    assert (found.value.kind, found.value.holder) == ("unclaimed", repr(holder))
    assert kept.units == [], "what nobody answers for is taken back"
