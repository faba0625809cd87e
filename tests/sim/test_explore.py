"""The exploration: what it visits, how it tells states apart, and what it says of a crash."""

import pytest

from holdfast.sim.explore import SETTINGS, explore
from holdfast.sim.fingerprint import Fingerprint
from holdfast.sim.found import Crashed
from holdfast.sim.tiny import Setting, TinyWorld

DENSE = Setting("dense", 2, 6)
STEP = ("plan", "settle")


def after(setting: Setting, *events: str) -> TinyWorld:
    world = TinyWorld(setting)
    for event in events:
        assert world.apply(event, watched=True), event
    return world


def digest(world: TinyWorld) -> bytes:
    return Fingerprint(world.scheduler, world.device, world.audience).digest()


def test_thousands_of_states_find_nothing() -> None:
    done = explore(3000)
    assert done.finding is None
    assert done.states >= 3000
    assert done.transitions > 2 * done.states
    assert done.depth >= 5


def test_the_settings_are_small_and_of_all_kinds() -> None:
    assert all(4 <= setting.pages <= 7 and setting.page_size in {2, 3} for setting in SETTINGS)
    assert {setting.layout for setting in SETTINGS} == {"dense", "window", "hybrid"}
    kinds = {(setting.layout, setting.page_size, setting.overlap) for setting in SETTINGS}
    assert kinds == {(a, b, c) for a in ("dense", "window", "hybrid") for b in (2, 3) for c in (False, True)}


def test_it_visits_the_same_states_again() -> None:
    assert explore(300).as_json() == explore(300).as_json()


def test_a_setting_with_nothing_left_to_try_is_exhausted() -> None:
    nothing_fits = Setting("dense", 2, 1)
    done = explore(5000, settings=(nothing_fits,))
    assert done.exhausted == 1
    assert 4 < done.states < 500
    assert done.finding is None


def test_units_that_differ_in_name_alone_are_one_state() -> None:
    straight = after(DENSE, "turn a", *STEP, *STEP, *STEP)
    detour = after(DENSE, "turn b", "plan", "settle", "abort b", "turn a", *STEP, *STEP, *STEP)
    assert detour.scheduler.registry.sessions["a"].sequence.full is not None
    assert digest(straight) == digest(after(DENSE, "turn a", *STEP, *STEP, *STEP))
    assert digest(detour) != digest(straight), "b has had one of its two turns"
    before = digest(straight)
    pool = next(iter(straight.ledger.pools.values()))
    pool.free.reverse()
    assert digest(straight) == before


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("turn a",), ("turn b",)),
        (("turn a", "plan"), ("turn a", "plan, every unit refused")),
        (("turn a", *STEP), ("turn a", "plan", "settle, failed before writing")),
        (("turn a", *STEP, "abort a"), ("turn a", *STEP, "interrupt a")),
        (("turn a", *STEP, *STEP, *STEP), ("turn a", *STEP, *STEP, *STEP, "close b")),
    ],
)
def test_states_that_differ_are_told_apart(left: tuple[str, ...], right: tuple[str, ...]) -> None:
    assert digest(after(DENSE, *left)) != digest(after(DENSE, *right))


def test_a_refused_event_leads_nowhere() -> None:
    world = after(Setting("dense", 2, 5, host=2), "turn a", *STEP, *STEP, *STEP)
    known = digest(world)
    assert "fork a" not in world.enabled()
    assert not world.apply("open a", watched=True)
    assert digest(world) == known


def test_a_crash_names_the_events_that_lead_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyWorld, "_turn", lambda _self, name: {}[name])
    with pytest.raises(Crashed, match="turn a") as crash:
        explore(50)
    assert isinstance(crash.value.__cause__, KeyError)


@pytest.mark.soak
def test_a_hundred_thousand_states_find_nothing() -> None:
    done = explore(100_000)
    assert done.finding is None
    assert done.states >= 100_000
