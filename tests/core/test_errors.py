"""Every refusal: each is raised by the core, names its field, and has changed nothing."""

from collections.abc import Callable

import pytest

from holdfast.core import errors
from holdfast.core.retention import Retention
from holdfast.core.turn import TurnRequest
from tests.core.driver import VOCABULARY, Driver, prompt

FIELDS = {
    "UnknownSession": ("session_not_found", "session_id"),
    "SessionExpired": ("session_expired", "session_id"),
    "SessionExists": ("session_exists", "id"),
    "SessionBusy": ("session_busy", "session_id"),
    "TooManySessions": ("too_many_sessions", None),
    "QueueFull": ("queue_full", None),
    "EmptyTurn": ("empty_turn", "input"),
    "UnknownToken": ("unknown_token", "input"),
    "TurnExists": ("turn_exists", "turn_id"),
    "TurnConflict": ("turn_conflict", "turn_id"),
    "RequestConflict": ("request_conflict", "request_id"),
    "JournalUnavailable": ("journal_unavailable", None),
    "SessionMoved": ("session_moved", None),
    "UnknownTurn": ("turn_not_found", "turn_id"),
    "NothingToKeep": ("nothing_to_keep", "keep_tokens"),
    "UnknownBoundary": ("turn_not_found", "to_turn"),
    "UnknownPosition": ("unknown_position", "start"),
    "AlreadyComputed": ("already_computed", "prompt_logprobs"),
    "BadMaxTokens": ("bad_max_tokens", "max_tokens"),
    "ContextExceeded": ("context_length_exceeded", "max_tokens"),
    "TooLarge": ("insufficient_memory", "input"),
    "OverQuota": ("over_quota", "input"),
}


def test_codes_and_fields_are_stable() -> None:
    refusals = [kind for kind in errors.Refused.__subclasses__() if kind.__module__ == errors.__name__]
    assert {kind.__name__: (kind.code, kind.param) for kind in refusals} == FIELDS


def test_a_session_that_another_server_owns_is_named_with_what_to_do() -> None:
    assert (
        str(errors.SessionMoved("s1")) == "session s1 belongs to another server now; send the request again"
    )


def busy_server() -> Driver:
    """`idle` with two turns, `busy` running, `waiting` queued, `sealing` not planned, `closing`, `gone`."""
    driver = Driver("hybrid", 3, pages=60, queue_max=1, running_max=3, sessions_max=7, context_length=150)
    driver.open("gone", ttl=1.0)
    driver.now = 2.0
    for seed, name in enumerate(("idle", "sealing", "busy", "closing", "waiting")):
        driver.open(name)
        driver.turn(name, 7, 3, seed)
    driver.turn("idle", 4, 2, 9)
    for name in ("busy", "closing"):
        driver.submit(name, prompt(5, 3), 20, turn_id=f"of {name}")
        driver.step()
    driver.submit("sealing", prompt(5, 3), 1, turn_id="of sealing")
    driver.plan()
    driver.budget = 2  # Rows for `busy` and `closing`, but none for the last token of `sealing`.
    driver.plan()
    driver.settle()
    assert [session.life.name for session in driver.registry.seals] == ["SEALING"]
    driver.scheduler.close("closing", driver.now)
    driver.submit("waiting", prompt(5, 4), 3, turn_id="of waiting")
    driver.scheduler.take_events()
    return driver


Call = Callable[[Driver], object]


def recover(driver: Driver, said: tuple[int, ...], generated: list[int]) -> object:
    history = [(TurnRequest("t1", prompt(4), 2), [1, 2]), (TurnRequest("t2", said, 2), generated)]
    return driver.scheduler.recover("new", "red", driver.now, Retention(60.0), history)


CASES: list[tuple[type[errors.Refused], str, Call]] = [
    (errors.UnknownSession, "submit", lambda d: d.submit("nobody", (1,), 1)),
    (errors.UnknownSession, "close", lambda d: d.scheduler.close("nobody", d.now)),
    (errors.UnknownSession, "fork", lambda d: d.scheduler.fork("nobody", "x", d.now)),
    (errors.UnknownSession, "rewind", lambda d: d.scheduler.rewind("nobody", 0, d.now)),
    (errors.UnknownSession, "spill", lambda d: d.scheduler.spill("nobody", d.now)),
    (errors.SessionExpired, "submit", lambda d: d.submit("gone", (1,), 1)),
    (errors.SessionExpired, "interrupt", lambda d: d.scheduler.interrupt("gone", d.now, 0)),
    (errors.SessionExists, "open", lambda d: d.open("idle")),
    (errors.SessionExists, "fork", lambda d: d.scheduler.fork("sealing", "idle", d.now)),
    (errors.SessionBusy, "submit while running", lambda d: d.submit("busy", (1,), 1)),
    (errors.SessionBusy, "submit while waiting", lambda d: d.submit("waiting", (1,), 1)),
    (errors.SessionBusy, "submit while closing", lambda d: d.submit("closing", (1,), 1)),
    (errors.SessionBusy, "rewind while running", lambda d: d.scheduler.rewind("busy", 0, d.now)),
    (errors.SessionBusy, "fork while waiting", lambda d: d.scheduler.fork("waiting", "x", d.now)),
    (errors.SessionBusy, "spill while running", lambda d: d.scheduler.spill("busy", d.now)),
    (errors.SessionBusy, "interrupt while closing", lambda d: d.scheduler.interrupt("closing", d.now, 0)),
    (errors.QueueFull, "submit", lambda d: d.submit("idle", (1,), 1)),
    (errors.QueueFull, "request", lambda d: d.request((1,), 1)),
    (errors.EmptyTurn, "submit", lambda d: d.submit("idle", (), 1)),
    (errors.EmptyTurn, "request", lambda d: d.request((), 1, goes_on=True)),
    (errors.UnknownToken, "submit", lambda d: d.submit("idle", (1, VOCABULARY), 1)),
    (errors.UnknownToken, "submit below 0", lambda d: d.submit("idle", (-1, 1), 1)),
    (errors.UnknownToken, "request", lambda d: d.request((VOCABULARY, 1), 1)),
    (errors.UnknownToken, "a history's input", lambda d: recover(d, (1, VOCABULARY), [1])),
    (errors.UnknownToken, "a history's output", lambda d: recover(d, (1, 2), [3, VOCABULARY])),
    (errors.TurnExists, "request", lambda d: d.request((1,), 1, turn_id="busy")),
    (errors.UnknownTurn, "abort", lambda d: d.scheduler.abort("busy", "of waiting", d.now)),
    (errors.UnknownTurn, "abort of none", lambda d: d.scheduler.abort("idle", "t1", d.now)),
    (errors.UnknownTurn, "abort while closing", lambda d: d.scheduler.abort("closing", "of closing", d.now)),
    (errors.UnknownTurn, "interrupt", lambda d: d.scheduler.interrupt("busy", d.now, 0, "of waiting")),
    (errors.UnknownTurn, "interrupt the last", lambda d: d.scheduler.interrupt("idle", d.now, 0, "t1")),
    (errors.NothingToKeep, "abort", lambda d: d.scheduler.abort("busy", "of busy", d.now, keep=5)),
    (errors.NothingToKeep, "abort below 0", lambda d: d.scheduler.abort("busy", "of busy", d.now, keep=-2)),
    (errors.NothingToKeep, "interrupt", lambda d: d.scheduler.interrupt("idle", d.now, 3)),
    (errors.UnknownBoundary, "rewind", lambda d: d.scheduler.rewind("idle", 3, d.now)),
    (errors.UnknownBoundary, "rewind below 0", lambda d: d.scheduler.rewind("idle", -1, d.now)),
    (errors.UnknownBoundary, "fork", lambda d: d.scheduler.fork("idle", "x", d.now, 3)),
    (errors.AlreadyComputed, "submit", lambda d: d.submit("idle", (1,), 1, computes_from=3)),
    (errors.ContextExceeded, "submit", lambda d: d.submit("idle", prompt(100), 40)),
    (errors.ContextExceeded, "request", lambda d: d.request(prompt(149), 2)),
    (errors.BadMaxTokens, "less than nothing", lambda d: d.request(prompt(4), -1)),
    (errors.EmptyTurn, "nothing to compute", lambda d: d.submit("idle", (), 0, goes_on=True)),
]


@pytest.mark.parametrize(
    ("refusal", "call"),
    [(kind, call) for kind, _, call in CASES],
    ids=[f"{kind.__name__}: {name}" for kind, name, _ in CASES],
)
def test_a_refusal_changes_nothing(refusal: type[errors.Refused], call: Call) -> None:
    driver = busy_server()
    with driver.unchanged(refusal):
        call(driver)


def test_caps_on_sessions_change_nothing() -> None:
    driver = busy_server()
    driver.open("sixth")
    driver.open("seventh")
    for call in (
        lambda: driver.open("eighth"),
        lambda: driver.scheduler.fork("sealing", "eighth", driver.now),
    ):
        with driver.unchanged(errors.TooManySessions):
            call()
    driver = Driver("dense", 3, tenant_sessions_max=1)
    driver.open("a")
    with driver.unchanged(errors.TooManySessions):
        driver.request((1, 2), 1)


@pytest.mark.parametrize(
    ("layout", "component", "needed", "sizes"),
    [
        ("dense", "full", 11, {"pages": 10}),
        ("window-only", "window", 9, {"pages": 8}),
        ("hybrid", "state", 2, {"pages": 100, "slots": 1}),
    ],
)
def test_a_turn_too_large_for_memory_is_refused_with_what_it_needs(layout, component, needed, sizes) -> None:
    driver = Driver(layout, 3, **sizes)
    driver.open("a")
    for call in (lambda: driver.submit("a", prompt(30), 3), lambda: driver.request(prompt(30), 3)):
        with driver.unchanged(errors.TooLarge):
            call()
    with pytest.raises(errors.TooLarge) as caught:
        driver.submit("a", prompt(30), 3)
    available = sizes.get("slots", sizes["pages"])
    assert (caught.value.component, caught.value.needed, caught.value.available) == (
        component,
        needed,
        available,
    )
    assert str(caught.value) == (
        f"the turn needs {needed} units of {component} memory; the server has {available}"
    )


def test_drafts_need_a_third_state_slot() -> None:
    driver = Driver("hybrid", 3, slots=2, propose=lambda session, turn: [])
    driver.open("a")
    with pytest.raises(errors.TooLarge) as caught:
        driver.submit("a", prompt(3), 3)
    assert (caught.value.needed, caught.value.available) == (3, 2)


def test_a_refused_request_does_not_wake_the_executor() -> None:
    driver = Driver("dense", 3)
    with pytest.raises(errors.EmptyTurn):
        driver.scheduler.request("red", TurnRequest("r", (), 1), 0.0)
    assert not driver.plan(), "nothing to forget, nothing to do"


def test_refusals_say_their_figures() -> None:
    said = [
        str(errors.UnknownToken("t1", 10)),
        str(errors.SessionMoved("s1")),
        str(errors.ContextExceeded(9, 8)),
        str(errors.TooLarge("full", 7, 6)),
        str(errors.OverQuota("state", 5, 4)),
    ]
    assert said[0] == "turn t1 has a token id outside the vocabulary: ids are 0 to 9"
    assert said[1].startswith("session s1 belongs to another server now;")
    assert said[2] == "the turn needs a context length of 9 tokens; the maximum is 8"
    assert said[3] == "the turn needs 7 units of full memory; the server has 6"
    assert said[4] == "the turn needs 5 units of state memory; its tenant may hold 4"
