"""Turns that do not keep their reasoning: what stays, what is computed again, and what a crash leaves.

The echo model repeats its input, so that what it is told to think and to say is what it thinks and says.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.core.errors import UnknownTurn
from holdfast.engine.durable.journal_reading import read_sessions
from holdfast.engine.echo import open_echo
from holdfast.engine.engine import Engine, Session, Turn
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from tests.engine.test_tool_turns import CALL, TOOLS

ECHOES = ("echo", "echo-window", "echo-hybrid")
THOUGHT = "<think>up or down? or neither of them</think>\n\n"


def opened(model: str = "echo", path: Path | None = None, **options: object) -> Engine:
    journal = {} if path is None else {"journal": str(path)}
    small = {"kv_tokens": 1 << 13, "window_tokens": 1 << 13, "state_slots": 32, "audit": "strict"}
    chosen = {**journal, **small, "reasoning_parser": "think", **options}
    return Engine(open_echo(model, make_options(**chosen)))


def tokens_of(session: Session) -> list[int]:
    log = session._engine.loop.scheduler.registry.find(session.id).sequence.tokens
    return log.slice(0, len(log))


def text_of(session: Session) -> str:
    tokenizer = session._engine.loop.setup.tokenizer
    return tokenizer.decode(tokens_of(session))


@pytest.mark.parametrize("model", ECHOES)
def test_the_history_is_as_if_the_answer_had_come_without_it(model: str) -> None:
    with opened(model) as engine, engine.session(keep_reasoning=False) as session:
        session.say("first words").wait()
        before = tokens_of(session)
        turn = session.say(f"{THOUGHT}Up.")
        assert (turn.text, turn.reasoning) == ("Up.", "up or down? or neither of them")
        output = turn.token_ids
        given = len(turn._turn.request.tokens)
        encode = engine.loop.setup.tokenizer.encode
        said = encode(THOUGHT.rstrip(), add_special_tokens=False)
        after = tokens_of(session)
        assert after[: len(before) + given] == [*before, *turn._turn.request.tokens]
        kept = after[len(before) + given :]
        assert kept == encode("Up.", add_special_tokens=False) + output[-1:]
        assert len(output) - len(kept) >= len(said)
        assert session.turns == 2
        recomputed = turn._stream.recomputed
        computed = engine.loop.scheduler.registry.find(session.id).sequence.computed
        assert recomputed == len(after) - computed >= len(kept)
        if model != "echo-hybrid":
            assert recomputed == len(kept), "every length can be resumed"
        else:
            assert computed >= len(before) - 1, "the history before the turn is never computed again"
        follows = session.say("deep")
        assert follows.text == "deep"
        assert follows.usage.cached_tokens == computed
        added = len(follows._turn.request.tokens)
        assert follows.usage.prompt_tokens - follows.usage.cached_tokens == recomputed + added


@pytest.mark.parametrize("overlap", [False, True])
def test_a_turn_says_otherwise_than_its_session(overlap: bool) -> None:
    with opened(overlap=overlap) as engine:
        with engine.session() as session:
            kept = session.say(f"{THOUGHT}Up.").wait()
            assert kept._stream.recomputed is None and text_of(session).count("neither") == 2
            session.say(f"{THOUGHT}Up.", keep_reasoning=False).wait()
            assert text_of(session).count("neither") == 3, "what was said to it stays"
        with engine.session(keep_reasoning=False) as session:
            session.say(f"{THOUGHT}Up.", keep_reasoning=True).wait()
            assert text_of(session).count("neither") == 2
            session.update(keep_reasoning=True)
            session.say(f"{THOUGHT}Up.").wait()
            assert text_of(session).count("neither") == 4


def test_an_answer_without_reasoning_stays_as_it_is() -> None:
    with opened() as engine, engine.session(keep_reasoning=False) as session:
        turn = session.say("Up.").wait()
        assert turn._stream.recomputed is None
        session.interrupt(keep=1)


def test_a_turn_that_ends_inside_its_reasoning_keeps_its_input() -> None:
    with opened() as engine, engine.session(keep_reasoning=False) as session:
        turn = session.say(f"{THOUGHT}Up.", Sampling(max_tokens=12)).wait()
        assert turn.finish_reason == "length"
        assert tokens_of(session) == list(turn._turn.request.tokens)
        assert session.say("and then").text == "and then"


def test_an_interrupted_turn_keeps_what_it_was_told_to_keep() -> None:
    with opened() as engine, engine.session(keep_reasoning=False) as session:
        turn = iter(session.say(f"{THOUGHT}Up."))
        next(turn)
        session.interrupt(keep="all")
        assert text_of(session).count("neither") == 2
        session.say(f"{THOUGHT}Up.").wait()
        with pytest.raises(UnknownTurn):
            session.interrupt(keep=1)


def test_calls_after_reasoning_stay_and_are_answered(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with opened(path=path, tool_parser="hermes") as engine:
        session = engine.session(id="s", tools=TOOLS, keep_reasoning=False)
        turn = session.say(f"{THOUGHT}{CALL}").wait()
        (call,) = turn.calls
        assert session.calls == [call] and text_of(session).count("neither") == 1
        known = tokens_of(session)
    with opened(path=path, tool_parser="hermes") as engine:
        session = engine.resume("s")
        assert session.calls == [call] and tokens_of(session) == known
        result = {"role": "tool", "tool_call_id": call.id, "content": "stars"}
        assert "stars" in session.say([result]).text


KILLS: dict[str, Callable[[Turn], bool]] = {
    "while it speaks": lambda turn: len(turn._stream.tokens) > 5,
    "at its last token": lambda turn: turn._stream.finish is not None,
    "when its end is told": lambda turn: turn.done,
}
"""When the process is killed."""


@pytest.mark.parametrize("model", ECHOES)
def test_a_kill_leaves_the_turn_without_its_reasoning_or_no_turn(model: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with opened(model, path) as engine:
        session = engine.session(id="s", keep_reasoning=False)
        session.say("first words").wait()
        before = tokens_of(session)
    with opened(model) as engine, engine.session(keep_reasoning=False) as session:
        session.say("first words").wait()
        session.say(f"{THOUGHT}Up.").wait()
        whole = tokens_of(session)
    allowed = dict(zip(KILLS, ([before], [before, whole], [whole]), strict=True))
    for when, is_due in KILLS.items():
        child = os.fork()
        if not child:
            engine = opened(model, path)
            turn = engine.resume("s").say(f"{THOUGHT}Up.")
            while not is_due(turn):
                engine.drive()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        (stored,) = read_sessions(path)
        left = [token for turn in stored.turns for token in (*turn.input, *turn.output)]
        assert left in allowed[when] and not stored.damaged, when
        with opened(model, path) as engine:
            session = engine.resume("s")
            assert tokens_of(session) == left
            session.rewind(1)
