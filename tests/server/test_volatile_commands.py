"""Turns of volatile sessions, as commands: opened, followed, cut, forked, refused and aborted."""

from typing import Any

import pytest

from holdfast.core.tokens import unpack
from holdfast.server.link import wire
from holdfast.server.link.commands import EngineCommands
from tests.server.in_process import echo_commands

NAME, CHILD = "ann~1", "ann~2"


def follow(commands: EngineCommands, call: int, text: str, **fields: Any) -> None:
    """Start a turn of a volatile session; `echo` has one token for each byte."""
    sampling = wire.SamplingFields(max_tokens=fields.pop("max_tokens", len(text)), ignore_eos=True)
    about = {"session": NAME, "known": 0, "keep": 0, "volatile": True, **fields}
    tokens = commands.loop.setup.tokenizer.encode(text, add_special_tokens=False)
    commands.receive(wire.StartTurn(call, f"t{call}", "ann", tokens, sampling, **about))


def quiet(commands: EngineCommands) -> list[wire.Report]:
    """Everything that is reported until there is nothing to do."""
    heard = commands.take_reports()
    while commands.loop.busy or commands.waits:
        commands.loop.step()
        commands.retry()
        heard += commands.take_reports()
    return heard


def ends(heard: list[wire.Report]) -> list[wire.End]:
    return [end for report in heard if isinstance(report, wire.Step) for end in report.ends]


def declined(heard: list[wire.Report]) -> list[tuple[int, str]]:
    return [(report.call, report.code) for report in heard if isinstance(report, wire.Declined)]


@pytest.fixture(params=["echo", "echo-window", "echo-hybrid"])
def commands(request: pytest.FixtureRequest) -> EngineCommands:
    """One volatile session of 20 tokens: ten that were said, and ten that were answered."""
    made = echo_commands(request.param, audit="strict")
    follow(made, 1, "0123456789")
    (end,) = ends(quiet(made))
    assert end.view is not None and (end.view.known, end.cached_tokens) == (20, 0)
    return made


def test_a_turn_follows_all_or_a_part_of_the_history(commands: EngineCommands) -> None:
    follow(commands, 2, "abc", known=20, keep=20)
    follow(commands, 3, "xyz", known=20, keep=10)  # It comes while the first one runs, and does not wait.
    heard = quiet(commands)
    assert declined(heard) == [(3, "session_busy")]
    assert [(end.prompt_tokens, end.view and end.view.known) for end in ends(heard)] == [(23, 26)]
    follow(commands, 4, "xyz", known=26, keep=10)
    (end,) = ends(quiet(commands))
    assert (end.prompt_tokens, end.text) == (13, "xyz")
    tokens = commands.loop.scheduler.registry.sessions[NAME].sequence.tokens
    said = commands.loop.setup.tokenizer.decode(tokens.slice(0, len(tokens)))
    assert said == "0123456789" + "xyz" + "xyz"


def test_what_is_not_there_is_refused_and_changes_nothing(commands: EngineCommands) -> None:
    sessions = commands.loop.scheduler.registry.sessions
    follow(commands, 2, "abc", known=21, keep=20)
    follow(commands, 3, "abc", session="ann~9", known=20, keep=20)
    follow(commands, 4, "abc", session=CHILD, parent="ann~9", known=5, keep=5)
    follow(commands, 5, "abc", session=CHILD, parent=NAME, known=21, keep=21)
    follow(commands, 6, "abc", session=CHILD, parent=NAME, known=5, keep=5, max_tokens=100_000)
    follow(commands, 7, "abc", known=20, keep=10, max_tokens=100_000)
    follow(commands, 8, "abc", session=CHILD, max_tokens=100_000)
    assert declined(quiet(commands)) == [
        (2, "history_changed"),
        (3, "session_not_found"),
        (4, "session_not_found"),
        (5, "turn_not_found"),
        (6, "context_length_exceeded"),
        (7, "context_length_exceeded"),
        (8, "context_length_exceeded"),
    ]
    assert list(sessions) == [NAME] and sessions[NAME].sequence.known == 20
    assert commands.loop.session_log.sessions == {} and commands.pulse().sessions == 0


def test_a_heartbeat_tells_which_pages_of_the_tree_are_leased(commands: EngineCommands) -> None:
    def in_tree() -> dict[str, int]:
        held = [each for each in commands.pulse().holders if each[1:3] == ("device", "TREE")]
        return {component: units for component, _, _, units in held}

    follow(commands, 2, "x" * 300, session="ann~3")
    quiet(commands)
    leased = commands.pulse().leased
    pages = next(iter(leased))
    assert leased.keys() == in_tree().keys() and in_tree()[pages] >= leased[pages] > 0
    commands.receive(wire.CloseSession(3, "ann~3"))
    quiet(commands)
    assert commands.pulse().leased[pages] < leased[pages], "nobody needs them now"
    assert in_tree()[pages] >= leased[pages], "and the tree still has them"


def test_a_fork_leaves_its_parent_as_it_is(commands: EngineCommands) -> None:
    follow(commands, 2, "abc", session=CHILD, parent=NAME, known=15, keep=15)
    follow(commands, 3, "xyz", known=20, keep=20)
    done = {end.turn: end for end in ends(quiet(commands))}
    assert [done[call].prompt_tokens for call in (2, 3)] == [18, 23]
    assert done[3].cached_tokens == 20
    commands.receive(wire.Ask(4, wire.Question.TOKENS, CHILD))
    (answer,) = quiet(commands)
    assert isinstance(answer, wire.Done) and isinstance(answer.answer, bytes)
    assert len(unpack(answer.answer)) == 21


@pytest.mark.parametrize(("keep", "known"), [(0, 13), (None, 10)])
def test_an_aborted_turn_keeps_its_prompt_or_nothing(
    commands: EngineCommands, keep: int | None, known: int
) -> None:
    follow(commands, 2, "abc", known=20, keep=10, max_tokens=500)
    while not any(isinstance(report, wire.Step) for report in commands.take_reports()):
        commands.loop.step()
    commands.receive(wire.EndTurn(2, keep, "gone"))
    (end,) = ends(quiet(commands))
    assert end.outcome == "aborted" and end.view is not None and end.view.known == known
    commands.receive(wire.CloseSession(3, NAME))
    heard = quiet(commands)
    assert [report.gone for report in heard if isinstance(report, wire.Step)] == [[(NAME, "closed")]]
    assert commands.loop.scheduler.registry.volatile == 0 and commands.loop.scheduler.recount() == []
