"""Token ids that are not in the vocabulary: no journal, caller or file of another model brings one in."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from holdfast.core import errors
from holdfast.engine.durable.journal import Journal
from holdfast.engine.durable.journal_reading import read_sessions
from holdfast.engine.durable.records import Ended, FinishedTurn, Opened, Record
from holdfast.engine.durable.recovery import sample_of
from holdfast.engine.engine import Engine
from holdfast.engine.options import OptionError
from holdfast.engine.sampling import Sampling, SamplingError
from holdfast.engine.text.tokenizer import Tokenizer
from tests.engine.conftest import Make
from tests.engine.direct import direct, submit
from tests.engine.test_session_log import history
from tests.engine.tiny import VOCABULARY, encoder, greedy, tokenizer, word

SAID = [word("the"), word("river"), word("runs")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.journal"


def alien(said: tuple[int, ...], answered: list[int]) -> list[Record]:
    """A session as a model with more tokens would have written it."""
    turn = FinishedTurn("t9", "body", "finished", "stop", "words", answered, 3, 0, 3)
    return [Opened("alien", "local", 60.0, "{}", None, 1000.0), Ended("alien", said, turn)]


def write(path: Path, records: list[Record]) -> None:
    with Journal(path, "commit", tokenizer().identity()) as journal:
        for record in records:
            journal.append(record)


def facts(path: Path) -> dict[str, str]:
    with closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT name, value FROM facts").fetchall())


def as_version_2(path: Path) -> None:
    """A journal that knows its vocabulary by how a sample is encoded."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM facts")
        connection.execute("INSERT INTO facts VALUES ('vocabulary', ?)", (sample_of(tokenizer()),))
        connection.execute("ALTER TABLE turns DROP COLUMN details")
        connection.execute("ALTER TABLE sessions DROP COLUMN tools")
        connection.execute("ALTER TABLE sessions DROP COLUMN settings")
        connection.execute("PRAGMA user_version = 2")
        connection.commit()


@pytest.mark.parametrize(
    ("said", "answered"),
    [((1, VOCABULARY), [2]), ((1, 2), [3, VOCABULARY]), ((1,), [(1 << 32) - 1])],
    ids=["input", "output", "the highest id"],
)
def test_a_session_with_unknown_tokens_stays_in_the_journal(
    make: Make,
    path: Path,
    said: tuple[int, ...],
    answered: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make(journal=str(path))
    engine.session(id="mine").say(SAID, greedy(4)).wait()
    known = history(engine, engine.resume("mine"))
    engine.close()
    write(path, alien(said, answered))
    for _ in range(2):
        caplog.clear()
        engine = make(journal=str(path))
        assert engine.sessions() == ["mine"]
        assert history(engine, engine.resume("mine")) == known
        assert (
            "session alien stays in the journal: turn t9 has a token id outside the vocabulary" in caplog.text
        )
        assert "start the server with the model that the session was written with" in caplog.text
        with pytest.raises(errors.SessionExists, match=r"outside the vocabulary.*or remove it with"):
            engine.session(id="alien")
        engine.resume("mine").say(SAID, greedy(4)).wait()
        known = history(engine, engine.resume("mine"))
        engine.close()
    stored = {session.id: session for session in read_sessions(path)}
    assert (stored["alien"].turns[0].input, stored["alien"].turns[0].output) == (list(said), answered)


def test_a_journal_of_version_2_is_known_by_its_vocabulary_from_then_on(make: Make, path: Path) -> None:
    engine = make(journal=str(path))
    engine.session(id="mine").say(SAID, greedy(4)).wait()
    engine.close()
    as_version_2(path)
    engine = make(journal=str(path))
    assert engine.sessions() == ["mine"]
    engine.close()
    assert facts(path)["vocabulary"] == tokenizer().identity() and "sample" not in facts(path)


def test_a_journal_of_version_2_with_unknown_tokens_is_left_to_the_model_that_wrote_it(
    make: Make, path: Path
) -> None:
    """The sample is encoded the same by a model with added tokens, to whom the journal may belong."""
    make(journal=str(path)).close()
    write(path, alien((VOCABULARY,), [1]))
    as_version_2(path)
    make(journal=str(path)).close()
    assert "vocabulary" not in facts(path) and facts(path)["sample"] == sample_of(tokenizer())
    with Journal(path, "commit", "of the model with more tokens", sample=sample_of(tokenizer())) as journal:
        assert [session.id for session in journal.load()] == ["alien"]
        journal.adopt_vocabulary()
    with pytest.raises(
        OptionError, match=r"another vocabulary; start with the model that it was written with"
    ):
        make(journal=str(path))


# --- the identity of a tokenizer ---


def identity(made: Encoder) -> str:
    return Tokenizer(made, template=None, names={}, eos_tokens=(0,)).identity()


def changed(**parts: object) -> Encoder:
    """The tests' tokenizer with another model."""
    written = json.loads(encoder().to_str())
    written["model"].update(parts)
    return Encoder.from_str(json.dumps(written))


def test_the_identity_of_a_tokenizer_is_all_that_gives_ids_a_meaning() -> None:
    mine = identity(encoder())
    assert mine == identity(Encoder.from_str(encoder().to_str())) == identity(encoder())
    more = encoder()
    more.add_tokens(["<tool>"])
    special = encoder()
    special.add_special_tokens([AddedToken("<tool>", special=True)])
    vocabulary = json.loads(encoder().to_str())["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġold"] = vocabulary["Ġold"], vocabulary["Ġthe"]
    swapped = changed(vocab=vocabulary)
    merged = changed(
        merges=[["Ġ", "t"]], vocab={**json.loads(encoder().to_str())["model"]["vocab"], "Ġt": 900}
    )
    others = [identity(each) for each in (more, special, swapped, merged)]
    assert len({mine, *others}) == 5
    assert sample_of(Tokenizer(more, template=None, names={}, eos_tokens=(0,))) == sample_of(tokenizer())


def test_how_merges_are_laid_out_does_not_count() -> None:
    vocabulary = {**json.loads(encoder().to_str())["model"]["vocab"], "th": 900}
    listed, joined = changed(merges=[["t", "h"]], vocab=vocabulary), changed(merges=["t h"], vocab=vocabulary)
    assert identity(listed) == identity(joined) != identity(changed(merges=[], vocab=vocabulary))


# --- callers in the process ---


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_no_caller_brings_an_unknown_token_past_the_loop(make: Make, token: int) -> None:
    engine: Engine = make()
    loop = engine.loop
    direct(loop, "open", "s", "local")
    for session_id in ("s", None):
        with pytest.raises(errors.UnknownToken):
            submit(loop, session_id, "t", (1, token), greedy(3))
    assert not loop.dispatcher.live.turns and not loop.busy
    with pytest.raises(ValueError, match="token ids are whole numbers"):
        engine.resume("s").say([1, token])


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_no_caller_brings_an_unknown_token_in_what_a_turn_asks_for(make: Make, field: str) -> None:
    loop = make().loop
    direct(loop, "open", "s", "local")
    values = {VOCABULARY: 1.0} if field == "logit_bias" else [VOCABULARY]
    sampling = Sampling(max_tokens=3, **{field: values})  # type: ignore[arg-type]
    for session_id in ("s", None):
        with pytest.raises(SamplingError, match=f"{field} names a token past the vocabulary"):
            submit(loop, session_id, "t", (1,), sampling)
    assert not loop.dispatcher.live.turns and not loop.busy
