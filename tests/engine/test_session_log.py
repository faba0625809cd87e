"""Sessions that outlive their engine: what was acknowledged is there again, and nothing is applied twice."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.core import errors
from holdfast.core.registry import Event
from holdfast.engine.durable.session_log import SYNC_SECONDS
from holdfast.engine.durable.stores import read_sessions
from holdfast.engine.engine import Engine, Session
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import OptionError
from tests.databases import forbid_writing, new_place, run_sql
from tests.engine.conftest import Make, maker
from tests.engine.direct import direct, settle
from tests.engine.direct import submit as direct_submit
from tests.engine.tiny import greedy, word

SAID = [word("the"), word("river"), word("runs")]


KINDS = (("bamba", "sqlite"), ("llama", "sqlite"), ("llama", "postgres"))


@pytest.fixture(params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A family of models, and a store for their journal."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def make(kind: tuple[str, str], directories: dict[str, Path]) -> Iterator[Make]:
    yield from maker(directories[kind[0]])


@pytest.fixture
def path(kind: tuple[str, str], tmp_path: Path) -> str:
    return new_place(kind[1], tmp_path / "sessions.journal")


def history(engine: Engine, session: Session) -> list[int]:
    tokens = engine.loop.scheduler.registry.find(session.id).sequence.tokens
    return tokens.slice(0, len(tokens))


def submit(loop: EngineLoop, name: str, turn_id: str, fingerprint: str, events: list[Event]) -> None:
    direct_submit(loop, name, turn_id, SAID, greedy(5), events.append, fingerprint=fingerprint)


def run(loop: EngineLoop) -> None:
    while loop.busy:
        loop.step()


def break_journal(engine: Engine, broken: bool) -> None:
    """Let nothing be written to the journal's file, or everything again."""
    journal = engine.loop.session_log.journal
    assert journal is not None
    forbid_writing(journal, broken)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_conversation_goes_on_with_another_engine(make: Make, path: str, overlap: bool) -> None:
    plain = make().session()
    expected = [plain.say([word(name)] * 9, greedy(7)).token_ids for name in ("cold", "deep", "old", "today")]
    engine = make(journal=path, overlap=overlap)
    session = engine.session(id="mine", system="Be brief.")
    for name, said in zip(("cold", "deep"), expected[:2], strict=True):
        assert session.say([word(name)] * 9, greedy(7)).token_ids == said
    known = history(engine, session)
    engine.close()

    engine = make(journal=path, overlap=overlap)
    assert engine.sessions() == ["mine"]
    session = engine.resume("mine")
    assert session.system == "Be brief."
    assert history(engine, session) == known
    assert session.turns == 2
    assert session.say([word("old")] * 9, greedy(7)).token_ids == expected[2]
    engine.close()
    engine = make(journal=path)
    assert engine.resume("mine").say([word("today")] * 9, greedy(7)).token_ids == expected[3]


def test_cuts_and_forks_are_remembered(make: Make, path: str) -> None:
    engine = make(journal=path)
    session = engine.session(id="s")
    ends: list[list[int]] = [[]]
    for name in ("cold", "deep", "old"):
        session.say([word(name)] * 3, greedy(6)).wait()
        ends.append(history(engine, session))
    fork, early = session.fork(), session.fork(1)
    session.interrupt(keep=2)
    cut = history(engine, session)
    assert cut == ends[3][: len(ends[2]) + 3 + 2]
    fork.rewind(2)
    engine.close()
    engine = make(journal=path)
    assert sorted(engine.sessions()) == sorted(["s", fork.id, early.id])
    assert history(engine, engine.resume("s")) == cut
    assert history(engine, engine.resume(fork.id)) == ends[2]
    assert history(engine, engine.resume(early.id)) == ends[1]
    engine.resume("s").interrupt(keep="none")
    assert history(engine, engine.resume("s")) == ends[2], "the last turn can still be cut after a restart"
    engine.resume(early.id).close()
    engine.close()
    engine = make(journal=path)
    assert sorted(engine.sessions()) == sorted(["s", fork.id])
    assert history(engine, engine.resume("s")) == ends[2]


def test_a_damaged_session_loses_nothing_that_is_said_after_it(make: Make, path: str) -> None:
    engine = make(journal=path)
    session = engine.session(id="s")
    ends: list[list[int]] = []
    for name in ("cold", "deep", "old"):
        session.say([word(name)] * 3, greedy(6)).wait()
        ends.append(history(engine, session))
    engine.close()
    run_sql(path, "UPDATE turns SET output = x'01000000' WHERE depth = 2")
    engine = make(journal=path)
    session = engine.resume("s")
    assert (session.turns, history(engine, session)) == (1, ends[0])
    session.say([word("today")] * 4, greedy(5)).wait()
    session.say([word("stones")] * 2, greedy(5)).wait()
    known, child = history(engine, session), session.fork(2)
    engine.close()
    engine = make(journal=path)
    assert history(engine, engine.resume("s")) == known
    assert history(engine, engine.resume(child.id)) == known[: -2 - 5]
    engine.resume("s").rewind(1)
    engine.close()
    engine = make(journal=path)
    assert history(engine, engine.resume("s")) == ends[0]


def test_an_interrupted_turn_is_kept_and_one_rolled_back_never_was(make: Make, path: str) -> None:
    engine = make(journal=path)
    kept, gone = engine.session(id="kept"), engine.session(id="gone")
    for session, keep in ((kept, 4), (gone, "none")):
        turn = session.say(SAID, greedy(40))
        while len(turn._stream.tokens) < 9:
            engine.drive()
        session.interrupt(keep=keep)
    known = history(engine, kept)
    assert len(known) == len(SAID) + 4
    engine.close()
    engine = make(journal=path)
    assert history(engine, engine.resume("kept")) == known
    assert engine.resume("kept").turns == 1
    assert history(engine, engine.resume("gone")) == []


def test_sessions_that_expire_are_gone_for_good(make: Make, path: str) -> None:
    engine = make(journal=path)
    direct(engine.loop, "open", "brief", "local", ttl=5.0)
    direct(engine.loop, "open", "long", "local", ttl=500.0)
    run(engine.loop)
    engine.loop.scheduler.tick(engine.loop.now() + 10.0)
    engine.loop.step()
    run(engine.loop)
    assert [stored.id for stored in read_sessions(path)] == ["long"]


def test_the_name_of_a_session_that_could_not_come_back_is_not_given_to_another(
    make: Make, path: str, tmp_path: Path
) -> None:
    """Its history and its file are there for the next engine that has room for it."""
    options = {"journal": path, "disk": str(tmp_path / "memory")}
    engine = make(**options)
    for name in ("a", "b", "c"):
        engine.session(id=name).say(SAID * 20, greedy(3)).wait()
    known = history(engine, engine.resume("b"))
    engine.close()
    files = {stored.id: stored.snapshot.file for stored in read_sessions(path) if stored.snapshot}
    assert sorted(files) == ["a", "b", "c"]
    run_sql(path, "UPDATE sessions SET tenant = 'nobody' WHERE id = 'c'")
    engine = make(**options, max_sessions=1)
    assert engine.sessions() == ["a"]
    engine.resume("a").close()
    for name, reason in (("b", "1 open sessions"), ("c", "its tenant is damaged")):
        with pytest.raises(errors.SessionExists, match=f"in the journal and could not.*{reason}"):
            engine.session(id=name)
    first = engine.session(id="d")
    with pytest.raises(errors.SessionExists, match="in the journal"):
        direct(engine.loop, "fork", "d", "b")
    assert first.say(SAID, greedy(3)).finish_reason == "length"
    engine.close()
    left = {file.name for file in (tmp_path / "memory").iterdir()}
    assert {name for name, file in files.items() if file in left} == {"b", "c"}
    engine = make(**options)
    assert sorted(engine.sessions()) == ["b", "d"]
    session = engine.resume("b")
    assert history(engine, session) == known
    assert session.say(SAID, greedy(3)).usage.cached_tokens == len(known)
    assert {stored.id: len(stored.turns) for stored in read_sessions(path)}["c"] == 1


# --- idempotency ---


@pytest.mark.parametrize("journal", [False, True], ids=["", "journal"])
def test_a_finished_turn_is_answered_again(make: Make, path: str, journal: bool) -> None:
    engine = make(journal=path if journal else None)
    loop = engine.loop
    direct(loop, "open", "s", "local", metadata={"caller": 7})
    events: list[Event] = []
    assert loop.session_log.replay("s", "t1", "body") is None
    submit(loop, "s", "t1", "body", events)
    assert loop.session_log.replay("s", "t1", "body") is None, "it has not finished"
    run(loop)
    again = loop.session_log.replay("s", "t1", "body")
    assert again is not None
    assert (again.outcome, again.reason, again.prompt_tokens) == ("finished", "length", 3)
    assert again.tokens == [token for event in events for token in event.tokens]
    assert again.text == loop.setup.tokenizer.decode(again.tokens)
    with pytest.raises(errors.TurnConflict):
        loop.session_log.replay("s", "t1", "another body")
    told = len(events)
    with pytest.raises(AssertionError, match="t1 of s"):
        submit(loop, "s", "t1", "body", events)  # It is replayed, which this listener does not expect.
    assert len(events) == told and not loop.busy
    assert loop.session_log.replay("nobody", "t1", "body") is None
    if journal:
        engine.close()
        loop = make(journal=path).loop
        assert loop.session_log.replay("s", "t1", "body") == again
        assert loop.session_log.sessions["s"].metadata == {"caller": 7}


def test_verbs_with_an_id_are_carried_out_once(make: Make, path: str) -> None:
    engine = make(journal=path)
    loop = engine.loop
    session = engine.session(id="s")
    for _ in range(3):
        session.say(SAID, greedy(4)).wait()
    settle(engine, "s")
    done: list[str] = []
    direct(loop, "rewind", "s", 2, request_id="q1", done=lambda: done.append("rewind"))
    direct(loop, "rewind", "s", 2, request_id="q1", done=lambda: done.append("again"))
    direct(loop, "fork", "s", "c", 1, request_id="q2", done=lambda: done.append("fork"))
    direct(loop, "fork", "s", "another name", 1, request_id="q2")
    assert done == [], "nothing is durable yet"
    run(loop)
    assert done == ["rewind", "again", "fork"] and sorted(loop.session_log.sessions) == ["c", "s"]
    for _ in range(2):
        session.say(SAID, greedy(4)).wait()
        settle(engine, "s")
        direct(loop, "interrupt", "s", 1, request_id="q3")
    ends = loop.scheduler.registry.sessions["s"].boundaries
    assert (ends[2] - ends[1], ends[3] - ends[2]) == (4, 7), "the second one did not cut the new turn"
    with pytest.raises(errors.RequestConflict):
        direct(loop, "rewind", "s", 1, request_id="q1")
    engine.close()
    loop = make(journal=path).loop
    direct(loop, "rewind", "s", 2, request_id="q1")
    assert loop.scheduler.registry.sessions["s"].boundaries == ends
    direct(loop, "fork", "s", "yet another", 1, request_id="q2")
    assert sorted(loop.session_log.sessions) == ["c", "s"]
    direct(loop, "close", "c")
    run(loop)
    with pytest.raises(errors.RequestConflict, match="session c, which is closed since"):
        direct(loop, "fork", "s", "yet another", 1, request_id="q2")
    assert sorted(loop.session_log.sessions) == ["s"]


# --- answers wait for the file ---


def test_without_a_journal_verbs_are_acknowledged_at_once(make: Make) -> None:
    loop = make().loop
    done: list[str] = []
    direct(loop, "open", "s", "local", done=lambda: done.append("open"))
    direct(loop, "fork", "s", "c", done=lambda: done.append("fork"))
    direct(loop, "rewind", "s", 0, done=lambda: done.append("rewind"))
    direct(loop, "close", "c", done=lambda: done.append("close"))
    assert done == ["open", "fork", "rewind", "close"]


def test_the_end_of_a_turn_is_told_when_it_is_written(make: Make, path: str) -> None:
    engine = make(journal=path)
    loop = engine.loop
    direct(loop, "open", "s", "local")
    run(loop)
    heard: list[tuple[str, int]] = []

    def listener(event: Event) -> None:
        heard.append((event.kind, len(read_sessions(path)[0].turns)))

    direct_submit(loop, "s", "t1", SAID, greedy(5), listener)
    run(loop)
    assert heard == [("tokens", 0)] * 5 + [("finished", 1)]


Verb = Callable[[EngineLoop], object]


@pytest.mark.parametrize("interrupted", [False, True], ids=["", "interrupted"])
def test_a_fault_holds_answers_back_and_refuses_what_is_new(make: Make, path: str, interrupted: bool) -> None:
    engine = make(journal=path)
    loop = engine.loop
    for name in ("s", "other"):
        direct(loop, "open", name, "local")
    run(loop)
    break_journal(engine, True)
    events: list[Event] = []
    done: list[str] = []
    long = tuple(SAID) * 200
    direct_submit(loop, "s", "t1", long, greedy(40), events.append, fingerprint="body")
    if interrupted:
        for _ in range(10):
            loop.step()
        assert len(events) >= 6
        loop.session_log.journal.fault = "it is known to be broken"
        direct(loop, "interrupt", "s", 4, done=lambda: done.append("interrupt"))
    for _ in range(60):
        loop.step()
    assert loop.session_log.fault is not None
    assert {event.kind for event in events} == {"tokens"}, "the end is not told"
    assert done == []
    verbs: list[Verb] = [
        lambda loop: submit(loop, "other", "t2", "x", []),
        lambda loop: direct(loop, "open", "new", "local"),
        lambda loop: direct(loop, "rewind", "other", 0),
        lambda loop: direct(loop, "fork", "other", "new"),
        lambda loop: direct(loop, "interrupt", "other"),
        lambda loop: loop.session_log.replay("s", "t1", "body"),
    ]
    for verb in verbs:
        with pytest.raises(errors.JournalUnavailable):
            verb(loop)
    assert sorted(loop.scheduler.registry.sessions) == ["other", "s"]
    assert engine.generate([SAID], greedy(3))[0].token_ids, "requests of their own need no journal"
    break_journal(engine, False)
    run(loop)
    assert loop.session_log.fault is None
    assert events[-1].kind == ("aborted" if interrupted else "finished")
    assert done == (["interrupt"] if interrupted else [])
    again = loop.session_log.replay("s", "t1", "body")
    assert again is not None and len(again.tokens) == (4 if interrupted else 40)
    submit(loop, "other", "t2", "x", [])
    run(loop)
    stored = {session.id: session.tokens for session in read_sessions(path)}
    assert stored == {"s": len(long) + len(again.tokens), "other": len(SAID) + 5}


HALF = "\ud800"  # Half of a character: it has no bytes.

TEXTS: dict[str, tuple[str, Verb]] = {
    "id": ("id", lambda loop: direct(loop, "open", HALF, "local")),
    "tenant": ("tenant", lambda loop: direct(loop, "open", "new", HALF)),
    "system": ("system", lambda loop: direct(loop, "open", "new", "local", system=HALF)),
    "turn": ("turn_id", lambda loop: submit(loop, "s", HALF, "x", [])),
    "fingerprint": ("fingerprint", lambda loop: submit(loop, "s", "t", HALF, [])),
    "interrupt": ("request_id", lambda loop: direct(loop, "interrupt", "s", 1, request_id=HALF)),
    "interrupt of": ("turn_id", lambda loop: direct(loop, "interrupt", "s", 1, HALF)),
    "rewind": ("request_id", lambda loop: direct(loop, "rewind", "s", 0, request_id=HALF)),
    "fork": ("request_id", lambda loop: direct(loop, "fork", "s", "new", request_id=HALF)),
    "child": ("id", lambda loop: direct(loop, "fork", "s", HALF)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_nobody_can_write_is_refused_before_it_blocks_the_journal(
    make: Make, path: str, text: str
) -> None:
    engine = make(journal=path)
    session = engine.session(id="s")
    known = session.say(SAID, greedy(3)).token_ids
    run(engine.loop)
    field, verb = TEXTS[text]
    with pytest.raises(errors.Refused, match=f"{field} contains a lone surrogate") as caught:
        verb(engine.loop)
    assert (caught.value.code, caught.value.param) == ("bad_text", field)
    assert history(engine, session) == [*SAID, *known]
    assert session.say(SAID, greedy(3)).finish_reason == "length"
    run(engine.loop)
    assert {stored.id: len(stored.turns) for stored in read_sessions(path)} == {"s": 2}


def test_metadata_may_hold_anything_that_json_does_and_a_session_may_live_for_ever(
    make: Make, path: str
) -> None:
    engine = make(journal=path)
    direct(engine.loop, "open", "s", "local", ttl=10**30, metadata={HALF: HALF})
    run(engine.loop)
    engine.close()
    assert make(journal=path).loop.session_log.sessions["s"].metadata == {HALF: HALF}


def test_with_durability_off_nothing_waits_and_nothing_is_refused(make: Make, path: str) -> None:
    engine = make(journal=path, durability="off")
    session = engine.session(id="s")
    break_journal(engine, True)
    assert session.say(SAID * 200, greedy(5)).finish_reason == "length"
    while engine.loop.session_log.fault is None:
        engine.loop.session_log.wait(SYNC_SECONDS)
    assert session.say(SAID * 100, greedy(5)).finish_reason == "length"
    break_journal(engine, False)
    engine.close()
    assert len(read_sessions(path)[0].turns) == 2


def test_a_mark_is_let_go_when_its_turn_is_durable(make: Make, path: str) -> None:
    engine = make(journal=path, checkpoints=0)
    session = engine.session(id="s")
    for _ in range(3):
        session.say(SAID * 4, greedy(5)).wait()
    run(engine.loop)
    assert engine.loop.scheduler.registry.find("s").sequence.points == []
    break_journal(engine, True)
    events: list[Event] = []
    direct_submit(engine.loop, "s", "t", SAID * 200, greedy(5), events.append)
    for _ in range(20):
        engine.loop.step()
    pinned = [point.pinned for point in engine.loop.scheduler.registry.find("s").sequence.points]
    assert pinned == ([] if engine.loop.setup.memory_plan.layout.cuts_anywhere else [True, True])
    break_journal(engine, False)
    run(engine.loop)
    assert engine.loop.scheduler.registry.find("s").sequence.points == []


def test_caps_of_a_tenant(make: Make, path: str) -> None:
    loop = make(tenant_sessions=2, max_sessions=5).loop
    direct(loop, "open", "a", "red")
    direct(loop, "open", "b", "red")
    with pytest.raises(errors.TooManySessions):
        direct(loop, "open", "c", "red")
    direct(loop, "open", "c", "blue")


def test_a_journal_in_use_is_an_error_of_the_option(
    make: Make, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(journal=path)
    monkeypatch.setattr("holdfast.engine.durable.recovery.LOCK_SECONDS", 0.1)
    with pytest.raises(OptionError, match="in use by another") as caught:
        make(journal=path)
    assert caught.value.option == "journal"
    for wrong in ({"durability": "always"}, {"disk_limit": 0}, {"snapshot_seconds": -1.0}):
        with pytest.raises(OptionError):
            make(**wrong)
