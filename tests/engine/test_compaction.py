"""Compaction on real models and in the journal: a range of turns gives way to a text, all or nothing."""

import os
import signal
from pathlib import Path

import pytest

from holdfast.core.errors import RequestConflict, SessionBusy, UnknownBoundary
from holdfast.engine.durable.answers import StoredAnswer, StoredCall, calls_in, details_of
from holdfast.engine.durable.records import Compacted, Ended, FinishedTurn, Forked, Opened, StoredSession
from holdfast.engine.durable.stores import read_log
from holdfast.engine.engine import Session
from holdfast.engine.tools.answer import AnswerSpec
from tests.databases import STORES, new_place
from tests.engine.conftest import Make
from tests.engine.direct import direct
from tests.engine.test_journal import store_at, write
from tests.engine.tiny import END, MARKS, greedy, word

CALLS = details_of(
    None, AnswerSpec(calls="hermes"), StoredAnswer("", (StoredCall("call", "f", "{}", "complete", 2),), 0)
)


def tokens_of(session: Session) -> list[int]:
    log = session._engine.loop.scheduler.registry.find(session.id).sequence.tokens
    return log.slice(0, len(log))


def computed(session: Session) -> int:
    return session._engine.loop.scheduler.registry.find(session.id).sequence.computed


def test_a_text_takes_the_place_of_turns_as_if_it_had_been_said(make_any: Make) -> None:
    engine = make_any(chunk_tokens=16)
    tokenizer = engine.loop.setup.tokenizer
    with engine.session(system="the river") as session:
        for said in ("runs cold", "and deep", "under old stones", "today"):
            session.say(said, greedy(5)).wait()
        before = tokens_of(session)
        ends = list(engine.loop.scheduler.registry.find(session.id).boundaries)
        left = session.compact(2, 3, "the old stones")
        summary = tokenizer.encode_continuation(
            [{"role": "user", "content": "the old stones"}], last_token=before[ends[0] - 1]
        )
        assert tokens_of(session) == [*before[: ends[0]], *summary, *before[ends[2] :]]
        assert session.turns == 3
        assert left == len(tokens_of(session)) - computed(session)
        # The prefix before it stays; its last token is not computed where the next turn came at once.
        assert ends[0] - 1 <= computed(session) <= ends[0]
        with engine.session() as fresh:
            expected = fresh.say([*tokens_of(session), word("deep")], greedy(6)).wait()
            turn = session.say([word("deep")], greedy(6)).wait()
            assert turn.token_ids == expected.token_ids
            assert turn.usage.computed_tokens == left + 1 + 6 - 1


@pytest.mark.parametrize("ended", [False, True])
def test_each_answer_has_its_end_token_once(make: Make, ended: bool) -> None:
    engine = make()
    session = engine.session()
    for number in range(3):
        limit = greedy(4, logit_bias={END: 100.0}, ignore_eos=False) if ended else greedy(2)
        turn = session.say(f"{number}", limit).wait()
        assert (turn.token_ids[-1] == END) is ended
    session.compact(2, 2, [{"role": "user", "content": "sum"}, {"role": "assistant", "content": "yes"}])
    text = engine.loop.setup.tokenizer.decode(tokens_of(session), skip_special_tokens=False)
    assert text.count(MARKS[0]) == (6 if ended else 5)
    assert f"sum{MARKS[0]}\n{MARKS[1]}assistant: yes{MARKS[0]}\n{MARKS[1]}user: 2{MARKS[0]}" in text
    session.compact(1, 1, "first")
    text = engine.loop.setup.tokenizer.decode(tokens_of(session), skip_special_tokens=False)
    assert text.startswith(
        f"{MARKS[1]}user: first{MARKS[0]}\n{MARKS[1]}assistant: {MARKS[0]}\n{MARKS[1]}user: sum"
    )


def test_it_is_carried_out_once_and_refused_while_a_turn_is_in_flight(make: Make) -> None:
    engine = make()
    session = engine.session()
    session.say([word("the")], greedy(3)).wait()
    session.say([word("river")], greedy(3)).wait()
    arguments = (session.id, (1, 1), [word("cold"), word("and")], "c1")
    left = engine.carry_out(engine.verbs.compact, *arguments, "r1")
    assert engine.carry_out(engine.verbs.compact, *arguments, "r1") == left
    assert session.turns == 2
    with pytest.raises(RequestConflict):
        engine.carry_out(engine.verbs.compact, session.id, (1, 1), [word("deep")], "c2", "r1")
    with pytest.raises(UnknownBoundary):
        session.compact(2, 3, "too far")
    history = tokens_of(session)
    session.say([word("old")], greedy(30))
    engine.drive()
    with pytest.raises(SessionBusy):
        session.compact(1, 1, "now")
    session.interrupt("none")
    assert tokens_of(session) == history


def test_it_survives_a_restart_and_a_file_that_reached_past_it_is_dropped(
    make_any: Make, tmp_path: Path
) -> None:
    options = {"journal": str(tmp_path / "journal"), "disk": str(tmp_path / "disk"), "disk_limit": 2 << 20}
    engine = make_any(**options)
    session = engine.session(id="talk")
    for name in ("the", "river", "runs"):
        session.say([word(name)] * 9, greedy(3)).wait()
    assert session.spill("disk")
    session.compact(2, 2, "cold")
    history = tokens_of(session)
    assert engine.loop.disk is not None and not engine.loop.disk.store.snapshots
    expected = session.fork().say([word("deep")], greedy(5)).wait().token_ids
    engine.close()
    again = make_any(**options).resume("talk")
    assert (tokens_of(again), again.turns) == (history, 3)
    assert again.say([word("deep")], greedy(5)).wait().token_ids == expected


# --- the journal ----------------------------------------------------------------------------------


def ended(number: int, details: str = "") -> Ended:
    turn = FinishedTurn(f"t{number}", "", "finished", "stop", "", [100 + number, 200 + number], 3, 0, 3)
    return Ended("s", (number, number), turn, details)


STORY = (Opened("s", "red", 60.0, "{}", None, 1000.0), ended(1), ended(2), ended(3), ended(4, CALLS))
COMPACTED = Compacted("s", 2, 3, "c1", (7, 8, 9))


@pytest.fixture(params=STORES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A journal of each store in turn."""
    return new_place(request.param, tmp_path / "journal")


def history(session: StoredSession) -> list[tuple[str, list[int], list[int]]]:
    return [(turn.turn_id, turn.input, turn.output) for turn in session.turns]


def test_the_turns_after_it_keep_their_answers_and_forks_keep_the_old_history(path: str) -> None:
    whole, fork = write(path, *STORY, Forked("f", "s", 4, 1001.0), COMPACTED)
    assert history(whole) == [
        ("t1", [1, 1], [101, 201]),
        ("c1", [7, 8, 9], []),
        ("t4", [4, 4], [104, 204]),
    ]
    assert [call.id for call in calls_in(whole.turns[2].details, 2)] == ["call"]
    assert [turn.turn_id for turn in fork.turns] == ["t1", "t2", "t3", "t4"]
    (last, _) = write(path, Compacted("s", 1, 3, "c2", (5,)))
    assert history(last) == [("c2", [5], [])]
    assert read_log(path, "s")[-1] == ("compacted", "turns 1 to 3: 1 tokens instead")


@pytest.mark.parametrize("point", ["before append", "mid-record", "after write", "after fsync"])
def test_a_death_leaves_the_old_history_or_the_new_one(path: str, point: str) -> None:
    write(path, *STORY)
    child = os.fork()
    if child == 0:

        def at(here: str) -> None:
            if here == point:
                os.kill(os.getpid(), signal.SIGKILL)

        journal = store_at(path, at)
        journal.append(COMPACTED)
        journal.flush()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (session,) = write(path)
    ids = [turn.turn_id for turn in session.turns]
    assert ids == (["t1", "c1", "t4"] if point == "after fsync" else ["t1", "t2", "t3", "t4"])
    assert not session.damaged


def test_verbs_wait_for_nothing_without_a_journal(make: Make) -> None:
    engine = make()
    session = engine.session()
    session.say([word("the")], greedy(3)).wait()
    engine.drive()
    assert direct(engine.loop, "compact", session.id, (1, 1), [word("old")], "c1") == 1
