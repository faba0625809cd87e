"""Listening ahead on real models: text is computed while it is said, and the answer is the same."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import EmptyTurn
from holdfast.engine.engine import Engine, Session
from holdfast.engine.reports.report import listening_report, memory_report, session_report
from holdfast.engine.turns.listening import LISTENING_SECONDS, ahead_of, settled
from tests.engine.conftest import Make
from tests.engine.tiny import greedy

SAID = "the river runs cold and deep under old stones today"


def settle(engine: Engine) -> None:
    while engine.loop.active:
        engine.drive()


def history(session: Session) -> list[int]:
    found = session._engine.loop.scheduler.registry.find(session.id)
    return found.sequence.tokens.slice(0, found.history)


def computed(engine: Engine) -> int:
    return engine.loop.scheduler.registry.counters.computed_tokens


def plain(engine: Engine, said: str) -> tuple[list[int], list[int]]:
    """The answer to a text that comes at once after a first turn, and the history after it."""
    with engine.session(system="the old stones") as session:
        session.say("cold and deep", greedy(4)).wait()
        turn = session.say(said, greedy(6)).wait()
        return turn.token_ids, history(session)


def test_what_was_appended_is_computed_once_and_answered_the_same(make_any: Make) -> None:
    engine = make_any(chunk_tokens=16)
    expected = plain(engine, SAID)
    with engine.session(system="the old stones") as session:
        session.say("cold and deep", greedy(4)).wait()
        before = history(session)
        for word in SAID.split(" "):
            session.append(word + " ")
            engine.drive()
            assert history(session) == before
        session.replace(len(SAID), "")
        settle(engine)
        found = engine.loop.scheduler.registry.find(session.id)
        assert found.state == "LISTENING" and session.turns == 1
        assert found.turn is not None and found.turn.computed >= 8
        counted, ahead = computed(engine), len(found.turn.request.tokens)
        shown: Any = session_report(engine.loop, found)
        tokens = {"heard": ahead, "ahead": found.sequence.computed - found.history}
        assert 8 <= tokens["ahead"] <= ahead
        assert shown["state"] == "LISTENING" and tokens.items() <= shown["tokens"].items()
        assert memory_report(engine.loop)["listening"] == [{"session": found.id, **tokens}]
        assert listening_report(engine.loop, found.tenant) and not listening_report(engine.loop, "nobody")
        turn = session.say("", greedy(6)).wait()
        assert session.pending == "" and memory_report(engine.loop)["listening"] == []
        shown = session_report(engine.loop, found)
        assert set(shown["tokens"]) == {"known", "computed"}
        assert (turn.token_ids, history(session)) == expected
        # The last word, the end of the message and the answer: the rest was computed while it was said.
        said = len(history(session)) - len(before) - 6
        assert 9 <= ahead < said and computed(engine) - counted <= said - (ahead - 1) + 6


def test_a_revision_is_answered_as_if_it_had_been_said_at_once(make_any: Make) -> None:
    engine = make_any(chunk_tokens=16)
    expected = plain(engine, "the river runs under old stones")
    with engine.session(system="the old stones") as session:
        session.say("cold and deep", greedy(4)).wait()
        session.append("the river runs cold and deep today")
        settle(engine)
        session.replace(len("the river runs "), "under old ")
        engine.drive()
        session.append("sto")
        turn = session.say("nes", greedy(6)).wait()
        assert (turn.token_ids, history(session)) == expected


def test_what_is_not_said_leaves_nothing_behind(make_any: Make) -> None:
    engine = make_any(chunk_tokens=16)
    expected = plain(engine, SAID)
    with engine.session(system="the old stones") as session:
        session.say("cold and deep", greedy(4)).wait()
        before = history(session)
        session.append("old stones and the deep river runs ")
        settle(engine)
        session.replace(0, "")
        settle(engine)
        found = engine.loop.scheduler.registry.find(session.id)
        assert found.turn is None and history(session) == before
        turn = session.say(SAID, greedy(6)).wait()
        assert (turn.token_ids, history(session)) == expected


def test_other_verbs_take_it_back(make: Make) -> None:
    engine = make()
    with engine.session() as session:
        session.say("cold and deep", greedy(4)).wait()
        session.say("the river", greedy(4)).wait()
        session.append("old stones and the deep river runs ")
        engine.drive()
        other = session.fork(1)
        assert other.turns == 1
        session.append("today and ")
        engine.drive()
        session.interrupt(keep=2)
        assert session.turns == 2
        session.append("today and ")
        engine.drive()
        session.rewind(1)
        assert history(session) == history(other)
        session.replace(0, "")
        with pytest.raises(EmptyTurn):
            session.say([], greedy(2))


def test_it_is_taken_back_when_nothing_more_is_said(make: Make) -> None:
    engine = make()
    with engine.session() as session:
        session.say("cold and deep", greedy(4)).wait()
        session.append("old stones and the deep river runs ")
        settle(engine)
        late = engine.loop.now() + LISTENING_SECONDS + 1
        engine.loop.scheduler.tick(late)
        engine.loop.dispatcher.tell()
        assert engine.loop.scheduler.registry.find(session.id).turn is None
        assert not engine.loop.dispatcher.live.turns


def test_a_restart_knows_only_what_was_said(make: Make, tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    engine = make(journal=journal)
    session = engine.session(id="talk")
    session.say("cold and deep", greedy(4)).wait()
    before = history(session)
    session.append("old stones and the deep river runs ")
    settle(engine)
    engine.loop.shut_down()
    again = make(journal=journal)
    assert history(again.resume("talk")) == before
    again.close()


def test_the_last_word_is_left_out() -> None:
    assert [settled(text) for text in ("", "one", "one ", "one two", "one two ", "one\ntwo")] == [
        "",
        "",
        "one",
        "one",
        "one two",
        "one",
    ]
    assert settled("x" * 40) == "x" * 36
    assert ahead_of(lambda text: [ord(letter) for letter in f"<{text}>"], "ab cd") == tuple(map(ord, "<ab"))
