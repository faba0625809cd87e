"""What the engine process reports of answers with reasoning and calls: deltas, ends, views, replays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.server.link import wire
from holdfast.server.link.commands import EngineCommands
from holdfast.server.link.worker import model_facts, stored_sessions
from tests.server.in_process import echo_commands
from tests.server.test_commands import of_call, reports, until_quiet

CALL = '<tool_call>{"name": "look", "arguments": {"where": "up"}}</tool_call>'
SAID = f"<think>hm</think>well {CALL}"
ANSWER = wire.AnswerFields("hermes", "think", tools={"look": {"where": ["string"]}})
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def start(commands: EngineCommands, call: int, said: str = SAID, **more: object) -> None:
    tokens = commands.loop.setup.tokenizer.encode(said)
    fields = {"session": "s", "answer": ANSWER, **more}
    commands.receive(wire.StartTurn(call, f"t-{call}", "ann", tokens, wire.SamplingFields(), **fields))  # type: ignore[arg-type]


def steps(heard: list[wire.Report]) -> tuple[list[wire.Delta], list[wire.End]]:
    found = [report for report in heard if isinstance(report, wire.Step)]
    return [each for step in found for each in step.deltas], [each for step in found for each in step.ends]


def joined(deltas: list[wire.Delta], part: wire.Part) -> str:
    return "".join(event.text for delta in deltas for event in delta.events or [] if event.part is part)


@pytest.fixture
def commands() -> EngineCommands:
    made = echo_commands("echo", audit="strict")
    made.receive(wire.OpenSession(1, "s", "ann", tools=TOOLS))
    reports(made)
    return made


def test_events_come_with_deltas_and_parts_with_the_end(commands: EngineCommands) -> None:
    start(commands, 2)
    deltas, (end,) = steps(until_quiet(commands))
    assert "".join(delta.text for delta in deltas) == end.text == "well"
    assert joined(deltas, wire.Part.TEXT) == "well" and joined(deltas, wire.Part.REASONING) == "hm"
    assert joined(deltas, wire.Part.CALL) == "look" and joined(deltas, wire.Part.CALL_END) == "complete"
    assert json.loads(joined(deltas, wire.Part.ARGUMENTS)) == {"where": "up"}
    assert end.answer is not None and end.view is not None
    assert end.answer.reasoning == "hm" and end.answer.reasoning_tokens == len("hm</think")
    (call,) = end.answer.calls
    assert (call.name, call.outcome) == ("look", "complete") and end.view.calls == [call]
    begun = [event for delta in deltas for event in delta.events or [] if event.part is wire.Part.CALL]
    assert [(event.id, event.index) for event in begun] == [(call.id, 0)]
    settled = [delta.settled for delta in deltas]
    assert settled[-1] == len(end.tokens) and min(filter(None, settled)) < len(SAID)
    assert wire.decode_report(wire.encode(wire.Step(deltas, [end], []))) == wire.Step(deltas, [end], [])


def test_a_plain_turn_reports_nothing_new(commands: EngineCommands) -> None:
    start(commands, 2, answer=None)
    deltas, (end,) = steps(until_quiet(commands))
    assert end.text == SAID and end.answer is None and end.view is not None and end.view.calls == []
    assert all(delta.events is None and delta.settled is None for delta in deltas)


def test_a_repeated_turn_reports_its_answer_again(commands: EngineCommands) -> None:
    start(commands, 2, fingerprint="body")
    _, (first,) = steps(until_quiet(commands))
    commands.receive(
        wire.StartTurn(3, "t-2", "ann", [1], wire.SamplingFields(), session="s", fingerprint="body")
    )
    deltas, (again,) = steps(reports(commands))
    assert (again.text, again.answer, again.tokens) == (first.text, first.answer, first.tokens)
    assert [event.part for event in deltas[0].events or []] == [
        wire.Part.REASONING,
        wire.Part.TEXT,
        wire.Part.CALL,
        wire.Part.ARGUMENTS,
        wire.Part.CALL_END,
    ]


def test_views_have_the_calls_that_the_history_ends_in(commands: EngineCommands) -> None:
    start(commands, 2)
    _, (end,) = steps(until_quiet(commands))
    commands.receive(wire.Fork(3, "s", "child", None))
    (forked,) = of_call(until_quiet(commands) + reports(commands), 3)
    assert isinstance(forked, wire.Done) and forked.view is not None and end.view is not None
    assert forked.view.calls == end.view.calls != []
    commands.receive(wire.Rewind(4, "s", 0))
    (rewound,) = of_call(until_quiet(commands) + reports(commands), 4)
    assert isinstance(rewound, wire.Done) and rewound.view is not None and rewound.view.calls == []


def test_a_turn_that_waits_for_its_grammar_and_is_given_up_has_an_empty_answer(
    commands: EngineCommands,
) -> None:
    start(commands, 2, grammar=wire.GrammarFields("regex", "a+"))
    commands.receive(wire.EndTurn(2, None, "gone"))
    heard = reports(commands) + until_quiet(commands)
    _, ended = steps(heard)
    assert [(end.turn, end.outcome) for end in ended] == [(2, "aborted")]
    assert ended[0].answer in (wire.AnswerParts(), wire.AnswerParts("", [], 0))


def test_a_grammar_that_is_none_is_declined(commands: EngineCommands) -> None:
    start(commands, 2, grammar=wire.GrammarFields("telepathy", "x"))
    start(commands, 3, grammar=wire.GrammarFields("regex", "(((("))
    heard = reports(commands) + until_quiet(commands) + reports(commands)
    for call in (2, 3):
        (declined,) = of_call(heard, call)
        assert isinstance(declined, wire.Declined)
        assert (declined.code, declined.param) == ("invalid_grammar", "grammar")


def test_an_unknown_format_is_declined(commands: EngineCommands) -> None:
    start(commands, 2, answer=wire.AnswerFields("telepathy"))
    (declined,) = of_call(reports(commands), 2)
    assert isinstance(declined, wire.Declined) and declined.code == "unknown_format"


def test_a_grammar_constrains_the_turn(commands: EngineCommands) -> None:
    start(commands, 2, "hello", answer=None, grammar=wire.GrammarFields("regex", "[0-9]{3}"))
    _, (end,) = steps(until_quiet(commands))
    assert end.text.isdigit() and len(end.text) == 3


def test_tools_and_calls_are_stored(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    commands = echo_commands("echo", journal=journal)
    commands.receive(wire.OpenSession(1, "s", "ann", tools=TOOLS))
    start(commands, 2, tools=[*TOOLS, *TOOLS])
    _, (end,) = steps(until_quiet(commands))
    commands.loop.shut_down()
    again = echo_commands("echo", journal=journal)
    (stored,) = stored_sessions(again.loop)
    assert stored.tools == [*TOOLS, *TOOLS], "the turn has changed them"
    assert end.answer is not None and stored.view.calls == end.answer.calls
    again.loop.shut_down()


def test_the_model_s_formats_are_facts() -> None:
    loop = echo_commands("echo", tool_parser="qwen3", reasoning_parser="deepseek-r1").loop
    facts = model_facts(loop, "echo")
    assert (facts.constrains, facts.calls, facts.reasoning) == (True, "hermes", "think")
    facts = model_facts(echo_commands("echo", tool_parser="harmony", reasoning_parser="think").loop, "echo")
    assert (facts.calls, facts.reasoning) == ("harmony", None)
    facts = model_facts(echo_commands("echo").loop, "echo")
    assert (facts.calls, facts.reasoning) == (None, None)
