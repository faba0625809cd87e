"""Tools, constraints and results on sessions and requests: what the engine is asked to start."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from holdfast.engine.constraints.grammar import Kind
from holdfast.engine.sampling import Sampling
from holdfast.server.dialects.answer_options import AnswerOptions
from holdfast.server.dialects.constraints import Constraint
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.sessions import SessionRecord
from holdfast.server.turn_request import Input, SessionGiven, TurnAsked
from tests.server.standing_in import ANN, EchoEngine

LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"a": {"type": "string"}}}},
}
GO = {"type": "function", "function": {"name": "go"}}
HELLO = Input(text="hello")
ONE_LETTER = Constraint(Kind.REGEX, "[a-z]", "regex")


def with_echo(story: Callable[[EchoEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = EchoEngine()
        facts = msgspec.structs.replace(engine.service.facts, constrains=True)
        engine.service.supervisor.facts = facts
        try:
            await story(engine)
        finally:
            engine.service.close()

    asyncio.run(run())


def asked(said: Input = HELLO, name: str = "t1", **options: Any) -> TurnAsked:
    return TurnAsked(said, Sampling(), name, answer=AnswerOptions(**options))


async def started(engine: EchoEngine, work: Any) -> wire.StartTurn:
    """What the engine is asked to start, and says yes to."""
    task = await engine.until_asked(work)
    if task.done():
        task.result()
    command = engine.asked[-1]
    assert isinstance(command, wire.StartTurn)
    engine.says(wire.Done(command.call, None))
    await task
    return command


async def problem_of(work: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        await work
    return caught.value


async def opened(engine: EchoEngine, given: SessionGiven) -> tuple[SessionRecord, wire.OpenSession]:
    task = await engine.until_asked(engine.service.sessions.open(ANN, "s", given))
    if task.done():
        task.result()
    command = engine.asked[-1]
    engine.says(wire.Done(command.call, wire.SessionView(command.session, 0, None, 0)))
    return await task, command


def text(engine: EchoEngine, command: wire.StartTurn) -> str:
    return engine.service.prompts.tokenizer.decode(command.tokens, skip_special_tokens=False)


def test_tools_of_a_session_are_sent_kept_and_rendered_with_its_first_turn() -> None:
    async def story(engine: EchoEngine) -> None:
        record, command = await opened(engine, SessionGiven(system="be brief", tools=[LOOK]))
        assert command.tools == [LOOK] and record.tools == [LOOK]
        first = await started(engine, engine.service.start_turn(record, asked()))
        assert "be brief" in text(engine, first) and '"look"' in text(engine, first)
        assert first.tools is None and first.grammar is None
        assert first.answer == wire.AnswerFields(
            calls="hermes", tools={"look": {"a": ["string"]}}, seed="ann/s/t1"
        )
        record.view = wire.SessionView("ann/s", 50, None, 1)
        later = await started(engine, engine.service.start_turn(record, asked(tools=[LOOK], name="t2")))
        assert '"look"' not in text(engine, later) and later.tools is None
        assert later.answer is not None and (later.answer.calls, later.answer.seed) == ("hermes", "ann/s/t2")

    with_echo(story)


def test_tools_of_a_first_turn_are_the_sessions_from_then_on() -> None:
    async def story(engine: EchoEngine) -> None:
        record, _ = await opened(engine, SessionGiven())
        first = await started(engine, engine.service.start_turn(record, asked(tools=[LOOK])))
        assert first.tools == [LOOK] and record.tools == [LOOK]
        record.view = wire.SessionView("ann/s", 50, None, 1)
        for other in ([GO], [LOOK, GO]):
            problem = await problem_of(engine.service.start_turn(record, asked(tools=other)))
            assert (problem.status, problem.code, problem.param) == (400, "tools_changed", "tools")
            assert "open another session" in problem.message
        must = await started(engine, engine.service.start_turn(record, asked(tool_choice="required")))
        assert must.grammar is not None and must.grammar.kind == "lark"
        none = await started(engine, engine.service.start_turn(record, asked(tool_choice="none")))
        assert none.grammar is None and none.answer is None
        record.view = wire.SessionView("ann/s", 0, None, 0)  # Rewound to its beginning.
        again = await started(engine, engine.service.start_turn(record, asked(tools=[GO])))
        assert again.tools == [GO] and record.tools == [GO]

    with_echo(story)


def test_tools_come_back_with_a_restarted_engine_and_go_along_with_a_fork() -> None:
    async def story(engine: EchoEngine) -> None:
        view = wire.SessionView("ann/s", 9, None, 1)
        stored = wire.StoredSession(view, "ann", None, {}, 0.0, [LOOK])
        vocabulary = wire.Vocabulary("", None, {}, [])
        engine.service.engine_ready(wire.Ready(engine.service.facts, vocabulary, [stored]))
        record = engine.service.table.find("ann", "s")
        assert record.tools == [LOOK]
        task = await engine.until_asked(engine.service.sessions.fork(record, "child", None))
        command = engine.asked[-1]
        view = wire.SessionView("ann/child", 9, None, 1)
        engine.says(wire.Done(command.call, view, "ann/child"))
        assert (await task).tools == [LOOK]

    with_echo(story)


def test_results_answer_the_calls_of_the_last_turn() -> None:
    async def story(engine: EchoEngine) -> None:
        record, _ = await opened(engine, SessionGiven(tools=[LOOK]))
        record.view = wire.SessionView("ann/s", 50, None, 1, [wire.CallFields("c1", "look", "{}")])
        result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
        turn = asked(Input(messages=[result]), expect_return_seconds=3.0)
        command = await started(engine, engine.service.start_turn(record, turn))
        assert "<tool_response>\nrain" in text(engine, command) and command.expect_return == 3.0
        other = {**result, "tool_call_id": "c2"}
        turn = TurnAsked(Input(messages=[other]), Sampling(), "t", fields={"messages": "input"})
        problem = await problem_of(engine.service.start_turn(record, turn))
        assert (problem.status, problem.param) == (400, "input[0].tool_call_id")
        assert problem.message.startswith("input[0].tool_call_id: ")

    with_echo(story)


def test_a_session_is_not_opened_with_tools_that_cannot_be_used() -> None:
    async def story(engine: EchoEngine) -> None:
        bad = {"type": "function", "function": {"name": "a b"}}
        problem = await problem_of(engine.service.sessions.open(ANN, "s", SessionGiven(tools=[bad])))
        assert (problem.status, problem.param) == (400, "tools[0].function.name")
        words = "x" * int(0.9 * engine.service.facts.context_length)
        long = {"type": "function", "function": {"name": "f", "description": words}}
        problem = await problem_of(engine.service.sessions.open(ANN, "s", SessionGiven(tools=[long])))
        assert (problem.code, problem.param) == ("context_length_exceeded", "tools")
        assert engine.asked == []

    with_echo(story)


@pytest.mark.parametrize("said", [HELLO, Input(text="x", templated=False), Input(tokens=[1, 2])], ids=str)
def test_a_constraint_goes_with_every_kind_of_input(said: Input) -> None:
    async def story(engine: EchoEngine) -> None:
        turn = asked(said, constraint=ONE_LETTER)
        command = await started(engine, engine.service.start_request(ANN, turn))
        assert command.grammar == wire.GrammarFields("regex", "[a-z]") and command.tokens

    with_echo(story)


def test_calls_of_choices_get_ids_of_their_own() -> None:
    async def story(engine: EchoEngine) -> None:
        turn = TurnAsked(HELLO, Sampling(n=2), "r", answer=AnswerOptions(tools=[LOOK]))
        task = await engine.until_asked(engine.service.start_request(ANN, turn))
        commands = engine.started()
        engine.says(*(wire.Done(command.call, None) for command in commands))
        await task
        seeds = [command.answer.seed for command in commands if command.answer is not None]
        assert seeds == ["ann#r", "ann#r.1"]

    with_echo(story)


def test_what_cannot_be_constrained_is_refused_with_the_field() -> None:
    async def story(engine: EchoEngine) -> None:
        facts = msgspec.structs.replace(engine.service.facts, constrains=False)
        engine.service.supervisor.facts = facts
        for options, param in (
            ({"constraint": ONE_LETTER}, "regex"),
            ({"tools": [LOOK], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [LOOK], "parallel_tool_calls": False}, "tools"),
        ):
            problem = await problem_of(engine.service.start_request(ANN, asked(**options)))
            assert (problem.status, problem.code, problem.param) == (400, "unsupported", param)

    with_echo(story)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"x": 1, "tools": []}}, "chat_template_kwargs.tools"),
        ({"thinking_tokens": 1, "separate_reasoning": False}, "thinking_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], param: str) -> None:
    async def story(engine: EchoEngine) -> None:
        problem = await problem_of(engine.service.start_request(ANN, asked(**options)))
        assert (problem.status, problem.param) == (400, param)
        assert engine.started() == []

    with_echo(story)


def test_an_error_of_the_engine_about_a_grammar_names_the_clients_field() -> None:
    async def story(engine: EchoEngine) -> None:
        field = "response_format.json_schema.schema"
        turn = asked(constraint=Constraint(Kind.JSON_SCHEMA, {"type": "object"}, field))
        task = await engine.until_asked(engine.service.start_request(ANN, turn))
        refusal = wire.Declined(engine.asked[-1].call, "invalid_grammar", "grammar: at /a: wrong", "grammar")
        engine.says(refusal)
        problem = await problem_of(task)
        assert (problem.param, problem.message) == (field, f"{field}: at /a: wrong")

    with_echo(story)


def test_options_stand_for_variables_of_the_template() -> None:
    assert AnswerOptions().template_kwargs == {}
    assert AnswerOptions(thinking=True).template_kwargs == {"enable_thinking": True, "thinking": True}
    none = AnswerOptions(reasoning_effort="none").template_kwargs
    assert none == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    given = AnswerOptions(thinking=True, chat_template_kwargs={"enable_thinking": False, "x": 1})
    assert given.template_kwargs == {"enable_thinking": False, "thinking": True, "x": 1}
