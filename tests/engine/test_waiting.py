"""A session whose memory is away is cut and forked like any other: its history is not computed again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.core.layout import Component, Tier
from holdfast.core.pressure import Pressure
from holdfast.core.session import Place
from holdfast.core.session import Session as CoreSession
from holdfast.engine.engine import Engine, Session
from holdfast.engine.turns.waiting import MemoryWait, end_of_turn
from tests.engine.conftest import Make
from tests.engine.direct import direct, settle
from tests.engine.tiny import WORDS, greedy, word

INPUT, OUTPUT = 21, 9

Verb = Callable[[Session], Session]


def said(turn: int) -> list[int]:
    return [word(WORDS[(turn * 3 + place) % len(WORDS)]) for place in range(INPUT)]


def talk(session: Session, turns: range) -> None:
    for turn in turns:
        session.say(said(turn), greedy(OUTPUT)).wait()


def prepared(make: Make, path: Path, **options: object) -> tuple[Engine, Session]:
    """A session of three turns, with a place to go to."""
    directory = {"disk": str(path / "disk"), "disk_limit": 2 << 20, "snapshot_seconds": 1e9}
    engine = make(host_memory=1 << 20, **directory, **options)
    session = engine.session(id="s")
    talk(session, range(3))
    return engine, session


def rewound(session: Session) -> Session:
    session.rewind(2)
    return session


def cut(session: Session) -> Session:
    session.interrupt(keep=4)
    return session


def taken_back(session: Session) -> Session:
    session.interrupt(keep="none")
    return session


def forked(session: Session) -> Session:
    return session.fork()


def forked_earlier(session: Session) -> Session:
    return session.fork(at_turn=2)


CUTS = [rewound, cut, taken_back, forked_earlier]


def cost(session: Session) -> tuple[list[int], int]:
    """What the next turn says, and how many tokens it computes before its own answer."""
    turn = session.say(said(7), greedy(OUTPUT))
    return turn.token_ids, turn.usage.computed_tokens


def cost_in_place(make: Make, verb: Verb) -> tuple[list[int], int]:
    """As `cost`, for a session whose memory never went away."""
    session = make(host_memory=1 << 20).session(id="s")
    talk(session, range(3))
    return cost(verb(session))


@pytest.mark.parametrize(("tier", "overlap"), [("host", True), ("disk", False)])
@pytest.mark.parametrize("verb", [*CUTS, forked])
def test_what_is_away_comes_back_first(
    make_any: Make, tmp_path: Path, verb: Verb, tier: str, overlap: bool
) -> None:
    expected, cheap = make_any.once(cost_in_place, verb)
    _, session = prepared(make_any, tmp_path, overlap=overlap)
    assert session.spill(tier)
    answer, computed = cost(verb(session))
    assert answer == expected
    assert computed <= cheap + 1, "the history was computed again"


def test_nobody_waits_for_memory_that_is_of_no_use(
    make_any: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, session = prepared(make_any, tmp_path, checkpoints=0)
    assert session.spill("host")
    scheduler, asked = engine.loop.scheduler, list[str]()

    def restore(_self: Pressure, away: CoreSession, _plan: object) -> bool:
        asked.append(away.id)
        scheduler.registry.drop_memory(away)
        return False

    monkeypatch.setattr(Pressure, "restore", restore)
    session.rewind(2)
    assert asked == (["s"] if scheduler.registry.ledger.layout.cuts_anywhere else [])


def test_a_copy_that_completes_a_fork_is_waited_for(make: Make, tmp_path: Path) -> None:
    engine, _ = prepared(make, tmp_path)
    if not engine.loop.scheduler.registry.ledger.layout.cuts_anywhere:
        pytest.skip("a fork has no checkpoint to go back to")
    settle(engine, "s")
    direct(engine.loop, "fork", "s", "child")
    assert engine.loop.scheduler.registry.copies, "a page is shared in part"
    child = engine.resume("child")
    child.rewind(2)
    assert cost(child)[1] <= INPUT + OUTPUT


def test_memory_that_no_cut_touches_stays_where_it_is(make_any: Make, tmp_path: Path) -> None:
    _, session = prepared(make_any, tmp_path)
    assert session.spill("host")
    session.interrupt(keep="all")
    session.rewind(3)
    assert session._engine.loop.scheduler.registry.find("s").place is Place.AWAY


def test_a_refusal_brings_nothing_back(make_any: Make, tmp_path: Path) -> None:
    _, session = prepared(make_any, tmp_path)
    assert session.spill("host")
    for refused in (lambda: session.rewind(4), lambda: session.fork(9), lambda: session.interrupt(keep=99)):
        with pytest.raises(Exception, match=r"has only 3 turns|9 were generated"):
            refused()
    assert session._engine.loop.scheduler.registry.find("s").place is Place.AWAY


def test_nobody_waits_for_a_session_whose_time_is_over(make: Make) -> None:
    engine = make(host_memory=1 << 20)
    loop = engine.loop
    direct(loop, "open", "s", "local", ttl=1000.0)
    session = engine.resume("s")
    talk(session, range(1))
    assert session.spill("host")
    wait = MemoryWait(loop.scheduler, "s", end_of_turn(None), forks=True)
    assert wait.over(loop.now() + 2000.0) and "s" not in loop.scheduler.registry.sessions


def test_nobody_waits_for_another_session_that_has_the_name_since(make: Make) -> None:
    engine = make(host_memory=1 << 20)
    loop = engine.loop
    session = engine.session(id="s")
    wait = MemoryWait(loop.scheduler, "s", end_of_turn(None), forks=True)
    session.close()
    session = engine.session(id="s")
    talk(session, range(1))
    assert session.spill("host")
    assert wait.over(loop.now())
    assert loop.scheduler.registry.find("s").place is Place.AWAY, "nothing was asked of it"


@pytest.mark.parametrize("verb", [rewound, forked])
def test_a_move_under_way_is_waited_for(make: Make, tmp_path: Path, verb: Verb) -> None:
    expected, cheap = cost(verb(prepared(make, tmp_path / "here")[1]))
    for back in (False, True):
        engine, session = prepared(make, tmp_path / f"moving-{back}")
        place = engine.loop.scheduler.registry.find("s")
        settle(engine, "s")
        assert direct(engine.loop, "spill", "s", Tier.DISK)
        if back:
            while place.place is not Place.AWAY:
                engine.drive()
            assert direct(engine.loop, "restore", "s")
        assert place.place is (Place.RETURNING if back else Place.LEAVING)
        answer, computed = cost(verb(session))
        assert answer == expected
        if verb is forked or engine.loop.scheduler.registry.ledger.layout.cuts_anywhere:
            assert computed <= cheap + 1


@pytest.mark.parametrize("verb", [rewound, forked])
def test_a_file_that_is_damaged_costs_its_memory_and_nothing_else(
    make: Make, tmp_path: Path, verb: Verb
) -> None:
    expected, _ = cost(verb(prepared(make, tmp_path / "here")[1]))
    engine, session = prepared(make, tmp_path / "there")
    assert session.spill("disk")
    (file,) = (tmp_path / "there" / "disk").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert cost(verb(session))[0] == expected
    assert engine.audit() == []


@pytest.mark.parametrize("verb", [rewound, forked])
def test_without_room_a_verb_waits_for_it(make: Make, tmp_path: Path, verb: Verb) -> None:
    expected, cheap = cost(verb(prepared(make, tmp_path / "here")[1]))
    engine, session = prepared(make, tmp_path / "there", kv_tokens=1024)
    assert session.spill("host")
    ledger = engine.loop.scheduler.registry.ledger
    pool = ledger.pool(Component.FULL)
    crowd = engine.session(id="crowd").say(said(1) * 43, greedy(60))
    while len(pool.free) * ledger.layout.page_size > 3 * (INPUT + OUTPUT) - 16:
        assert crowd._turn is not None and not crowd._turn.over
        engine.drive()
    target = verb(session)
    if verb is forked or ledger.layout.cuts_anywhere:
        assert crowd.done, "it made room by its end"
        assert cost(target) == (expected, cheap)
    assert engine.audit() == []
