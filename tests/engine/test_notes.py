"""Notes of turns, and metadata that changes: kept with the session, in its forks, and in the journal."""

from pathlib import Path

import pytest

from holdfast.engine.durable.answers import NotedTurn, StoredAnswer, StoredCall, details_of, noted_in
from holdfast.engine.durable.journal import Journal
from holdfast.engine.durable.records import FinishedTurn
from holdfast.engine.durable.recovery import noted_turn
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.echo import open_echo
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.engine.turns.spec import NotesTooLarge, TurnSpec
from holdfast.engine.verbs import Verbs
from tests.engine.direct import Heard
from tests.engine.test_verbs import Replies

ANSWER = StoredAnswer("hm", (StoredCall("c1", "look", "{}", "complete", 3),), 2)


def finished(turn_id: str, answer: StoredAnswer | None = None) -> FinishedTurn:
    return FinishedTurn(turn_id, "", "finished", "stop", f"said {turn_id}", [7, 8], 5, 3, 4, answer)


def end(
    log: SessionLog, session: str, number: int, note: str | None, answer: StoredAnswer | None = None
) -> None:
    turn = finished(f"t{number}", answer)
    noted = None if note is None else noted_turn(note, turn)
    log.ended(session, (1, 2), turn, number, details_of(None, None, answer, noted), noted)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def opened(path: Path) -> SessionLog:
    """A log of a journal, with the sessions that are in it."""
    journal = Journal(path, "commit", "vocabulary")
    log = SessionLog(journal)
    for stored in journal.load():
        log.recovered(stored)
    log.start()
    return log


def test_details_keep_a_note_with_its_result() -> None:
    noted = NotedTurn("t1", '{"a": "ü"}', "finished", "stop", "text", 5, 3, 2, ANSWER)
    assert noted_in(details_of(None, None, ANSWER, noted)) == noted
    assert noted_in(details_of(None, None, None)) is None
    assert noted_in('{"calls": []}') is None


@pytest.mark.parametrize(
    "details",
    ["7", "{", '{"noted": 7}', '{"noted": {}}', '{"noted": {"turn_id": 1}}', '{"noted": {"answer": 7}}'],
)
def test_a_damaged_note_is_none(details: str) -> None:
    assert noted_in(details) is None


def test_a_note_of_the_wrong_types_is_none() -> None:
    noted = NotedTurn("t1", "note", "finished", "stop", "text", 5, 3, 2)
    damaged = details_of(None, None, None, noted).replace('"note": "note"', '"note": 7')
    assert noted_in(damaged) is None


def test_notes_and_metadata_are_there_after_a_restart(path: Path) -> None:
    log = opened(path)
    log.opened("s", "ann", metadata={"a": 1})
    for number in range(1, 12):
        end(log, "s", number, None if number == 2 else f"note {number}", ANSWER if number == 1 else None)
    log.updated("s", {"b": ["ü"]})
    log.forked("f", "s", 4)
    log.truncated("s", 10, None)
    log.close()

    log = opened(path)
    kept, fork = log.sessions["s"], log.sessions["f"]
    assert list(kept.noted) == [1, 3, 4, 5, 6, 7, 8, 9, 10], "all of them, and not only the last eight"
    assert kept.noted[1] == noted_turn("note 1", finished("t1", ANSWER))
    assert kept.noted[10].text == "said t10"
    assert list(fork.noted) == [1, 3, 4]
    assert kept.metadata == fork.metadata == {"b": ["ü"]}
    log.close()


def test_a_compaction_takes_the_notes_of_its_turns_along(path: Path) -> None:
    log = opened(path)
    log.opened("s", "ann")
    for number in range(1, 6):
        end(log, "s", number, "x" * number)
    assert log.sessions["s"].note_characters == 15
    log.compacted("s", 2, 3, "c", (1, 2))
    entry = log.sessions["s"]
    assert {number: noted.turn_id for number, noted in entry.noted.items()} == {1: "t1", 3: "t4", 4: "t5"}
    log.close()
    assert opened(path).sessions["s"].noted == entry.noted
    assert entry.note_characters == 10


def test_notes_are_bounded_for_each_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.turns.beginner.NOTES_MIN", 64)
    monkeypatch.setattr("holdfast.engine.turns.beginner.NOTE_CHARACTERS_PER_TOKEN", 0)
    loop = open_echo("echo", make_options(kv_tokens=4096))
    verbs = Verbs(loop)
    verbs.open(Replies(), "s", "ann")

    def submit(turn_id: str, note: str) -> None:
        spec = TurnSpec(turn_id, "ann", [1, 2], Sampling(max_tokens=1), "s", note=note)
        verbs.submit(Heard(), spec)
        while loop.busy:
            loop.step()

    submit("t1", "x" * 60)
    with pytest.raises(NotesTooLarge):
        submit("t2", "x" * 5)
    submit("t3", "x" * 4)
    assert len(loop.session_log.sessions["s"].noted) == 2
    loop.shut_down()
