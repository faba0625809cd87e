"""Turns that call tools: their calls in results, sessions and the journal, and cuts in the middle of one.

The echo model repeats its input, so that what it is told to say is what it says.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.core.turn import KEEP_ALL
from holdfast.engine.echo import open_echo
from holdfast.engine.engine import Engine, Session, Turn
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.engine.text.answer_reader import AnswerReader
from holdfast.engine.tools.answer import AnswerSpec
from holdfast.engine.tools.events import CallBegin
from holdfast.engine.tools.request import ToolsRefused
from holdfast.engine.turns.spec import TurnSpec
from tests.engine.direct import Heard

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string"}},
                "required": ["where"],
            },
        },
    }
]
CALL = '<tool_call>{"name": "look", "arguments": {"where": "up"}}</tool_call>'


def opened(path: Path | None = None, **options: object) -> Engine:
    journal = {} if path is None else {"journal": str(path)}
    small = {"kv_tokens": 1 << 14, "audit": "strict"}
    return Engine(open_echo("echo", make_options(**journal, **small, **options)))


def drive(engine: Engine, turn: Turn, tokens: int) -> None:
    while not turn.done and len(turn._stream.tokens) < tokens:
        engine.drive()


def test_a_turn_ends_in_calls_and_the_next_brings_their_results() -> None:
    with opened() as engine, engine.session(tools=TOOLS) as session:
        turn = session.say(f"well {CALL}")
        assert "".join(turn) == turn.text == "well" and turn.finish_reason == "tool_calls"
        (call,) = turn.calls
        assert (call.name, json.loads(call.arguments)) == ("look", {"where": "up"})
        assert session.calls == [call] and any(isinstance(event, CallBegin) for event in turn.events)
        result = {"role": "tool", "tool_call_id": call.id, "content": "stars"}
        after = session.say([result])
        assert "stars" in after.text and after.calls == () and session.calls == []
        with pytest.raises(ToolsRefused, match="tool_call_id"):
            session.say([{**result, "tool_call_id": "another"}])


def test_a_required_call_is_made() -> None:
    with opened() as engine, engine.session(tools=TOOLS) as session:
        for choice in ("required", {"type": "function", "function": {"name": "look"}}):
            turn = session.say("nothing of that kind", Sampling(max_tokens=300), tool_choice=choice)
            (call,) = turn.calls
            assert call.name == "look" and set(json.loads(call.arguments)) == {"where"}
        # A grammar constrains the text of an answer; a required call has none.
        turn = session.say("no", Sampling(max_tokens=300), tool_choice="required", grammar={"type": "object"})
        assert turn.text == "" and [call.name for call in turn.calls] == ["look"]
        plain = session.say(CALL, tool_choice="none")
        assert plain.text == CALL and plain.calls == ()


def test_reasoning_comes_apart() -> None:
    with opened(reasoning_parser="think") as engine, engine.session() as session:
        turn = session.say("<think>up or down?</think>Up.")
        assert (turn.text, turn.reasoning, turn.finish_reason) == ("Up.", "up or down?", "stop")
        assert turn.answer.reasoning_tokens > 5
        budget = session.say("<think>up or down?</think>Up.", thinking_tokens=3)
        assert budget.reasoning == "up"


def test_calls_and_tools_survive_a_restart_and_go_to_forks(tmp_path: Path) -> None:
    with opened(tmp_path / "journal") as engine:
        session = engine.session(id="s", tools=TOOLS)
        call = session.say(CALL).calls[0]
        child = session.fork()
        assert child.tools == TOOLS and child.calls == [call]
        session.say("and then").wait()
        assert session.calls == [] and child.calls == [call]
        name = child.id
    with opened(tmp_path / "journal") as engine:
        session, child = engine.resume("s"), engine.resume(name)
        assert session.tools == child.tools == TOOLS
        assert child.calls == [call] and session.calls == []
        session.rewind(1)
        assert session.calls == [call], "the turn that called is the last again"
        child.interrupt(keep=9)
        assert child.calls == [], "half a call is none"
        session.rewind(0)
        assert session.calls == []


def inside(engine: Engine, session: Session, said: str, tokens: int) -> Turn:
    """A turn that has said so many tokens, which end inside a call."""
    turn = session.say(said)
    drive(engine, turn, tokens)
    assert not turn.done and turn._stream.settled_tokens < tokens
    return turn


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_turn_keeps_no_half_a_call(overlap: bool) -> None:
    with opened(overlap=overlap) as engine, engine.session(tools=TOOLS) as session:
        first = f"well {CALL}"
        turn = inside(engine, session, f"{first} and {CALL}", len(first) + 15)
        session.interrupt()
        assert turn.finish_reason == "abort"
        assert turn.text.rstrip() == "well and"
        assert len(turn.token_ids) == len(f"{first} and ") and len(turn.calls) == 1
        assert session.calls == list(turn.calls)
        turn = inside(engine, session, f"well {CALL}", 20)
        session.interrupt(keep=17)
        assert len(turn.token_ids) == 17, "a number of tokens is obeyed exactly"
        assert turn.calls == () and turn.text == "well"
        assert session.calls == []


@pytest.mark.parametrize("ends", ["abort", "deadline"])
def test_an_abandoned_turn_that_keeps_its_output_keeps_no_half_a_call(ends: str) -> None:
    clock = [0.0]
    loop = open_echo("echo", make_options(kv_tokens=1 << 14, audit="strict"), clock=lambda: clock[0])
    with Engine(loop) as engine:
        session = engine.session(tools=TOOLS)
        heard, tokens = Heard(), loop.setup.tokenizer.encode(f"well {CALL}")
        engine.verbs.submit(
            heard,
            TurnSpec(
                "t",
                "local",
                tokens,
                Sampling(),
                session.id,
                keeps=True,
                timeout=5.0,
                answer=AnswerSpec("hermes"),
            ),
        )
        while len(heard.events) < 20:
            engine.drive()
        if ends == "abort":
            engine.verbs.abort(heard, KEEP_ALL, "the client went away")
        clock[0] = 6.0
        while heard.events[-1].kind == "tokens":
            engine.drive()
        assert heard.events[-1].kind == "aborted" and heard.turn is not None
        assert heard.turn.generated == len("well ")
        assert session.turns == 1 and session.calls == []


def test_a_plain_turn_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream runs the code of a stream without a reader."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a plain turn is not read")

    monkeypatch.setattr(AnswerReader, "__init__", never)
    with opened() as engine, engine.session() as session:
        turn = session.say(CALL)
        assert turn.text == CALL and turn._stream.reader is None and turn._stream.constraint is None
        assert turn.answer.text == CALL and turn.calls == () and turn.reasoning == "" and turn.events == []
