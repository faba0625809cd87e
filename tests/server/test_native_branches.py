"""Branching sessions: what a request inherits, what a replacement forgets, and what is refused."""

import pytest

from holdfast.core.errors import TurnExists
from holdfast.server.branching import (
    BadOffset,
    BranchingSession,
    RequestRunning,
    SessionFull,
    UnknownRequest,
)
from holdfast.server.http.problems import STATUS_OF_CODE


@pytest.fixture
def session() -> BranchingSession:
    """One finished request `root`: prompt 1 2 3, output 4 5."""
    session = BranchingSession(capacity=100)
    assert session.begin("root", None, [1, 2, 3]) == []
    session.record("root", [4, 5])
    return session


def picture(session: BranchingSession) -> object:
    """Everything that a refusal must leave alone."""
    return session.held, {
        rid: (log.parent, tuple(log.children), log.tokens.packed(0, 99), log.output_start, log.finished)
        for rid, log in session.logs.items()
    }


@pytest.mark.parametrize(
    ("offset", "drop", "composed"),
    [
        (0, False, [1, 2, 3, 4, 5, 9]),
        (0, True, [1, 2, 3, 9]),
        (2, False, [1, 2, 9]),
        (2, True, [1, 2, 9]),
        (4, False, [1, 2, 3, 4, 9]),
        (4, True, [1, 2, 3, 9]),
        (5, False, [1, 2, 3, 4, 5, 9]),
        (50, False, [1, 2, 3, 4, 5, 9]),
        (-1, False, [1, 2, 3, 4, 9]),
        (-1, True, [1, 2, 9]),
        (-5, False, [9]),
        (-3, True, [9]),
    ],
)
@pytest.mark.parametrize("replace", [False, True])
def test_compose_takes_the_parent_up_to_the_offset(session, offset, drop, composed, replace) -> None:
    before = picture(session)
    assert session.compose("root", [9], offset, replace, drop) == composed
    assert picture(session) == before


@pytest.mark.parametrize("replace", [False, True])
def test_without_a_parent_a_request_stands_alone_and_its_offset_means_nothing(session, replace) -> None:
    assert session.compose(None, [7, 8], -1, replace, drop_previous_output=True) == [7, 8]


def test_two_requests_branch_from_one(session) -> None:
    session.begin("left", "root", session.compose("root", [6]))
    session.begin("right", "root", session.compose("root", [7], drop_previous_output=True))
    session.record("right", [8])
    session.record("left", [9])
    assert session.compose("left", [0]) == [1, 2, 3, 4, 5, 6, 9, 0]
    assert session.compose("right", [0]) == [1, 2, 3, 7, 8, 0]
    assert session.logs["root"].children == ["left", "right"]
    assert session.held == 5 + 7 + 5


def test_output_is_recorded_as_it_comes(session) -> None:
    session.begin("next", "root", session.compose("root", [6]))
    session.record("next", [7], finished=False)
    session.record("next", [8], finished=False)
    session.record("next", [], finished=True)
    assert session.compose("next", []) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert session.compose("next", [], drop_previous_output=True) == [1, 2, 3, 4, 5, 6]


def grown(session: BranchingSession) -> None:
    """root - a - b (running), root - c (running), other (running, a branch of its own)."""
    session.begin("a", "root", session.compose("root", [6]))
    session.record("a", [7])
    session.begin("b", "a", session.compose("a", [8]))
    session.begin("c", "root", session.compose("root", [9]))
    session.begin("other", None, [1])


def test_replacing_forgets_what_grew_out_of_the_parent(session) -> None:
    grown(session)
    prompt = session.compose("root", [5], replace=True)
    assert session.begin("d", "root", prompt, replace=True) == ["c", "b"], "both were running"
    assert set(session.logs) == {"root", "other", "d"}
    assert session.logs["root"].children == ["d"]
    assert session.held == 5 + 1 + 6
    with pytest.raises(UnknownRequest):
        session.compose("a", [1])
    with pytest.raises(UnknownRequest, match="no request b"):
        session.record("b", [1])


def test_replacing_without_a_parent_forgets_everything(session) -> None:
    grown(session)
    assert sorted(session.begin("new", None, [2, 2], replace=True)) == ["b", "c", "other"]
    assert list(session.logs) == ["new"] and session.held == 2


def test_replacing_a_running_parent_ends_it_with_what_it_has_said(session) -> None:
    session.begin("live", "root", session.compose("root", [6]))
    session.record("live", [7, 8], finished=False)
    prompt = session.compose("live", [9], offset=7, replace=True)
    assert prompt == [1, 2, 3, 4, 5, 6, 7, 9]
    assert session.begin("next", "live", prompt, replace=True) == ["live"]
    before = picture(session)
    with pytest.raises(UnknownRequest, match="live is over"):
        session.record("live", [1], finished=False)
    assert picture(session) == before
    assert session.compose("live", []) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_refusals_change_nothing(session) -> None:
    session.begin("live", "root", session.compose("root", [6]))
    before = picture(session)
    for refusal, call in (
        (UnknownRequest, lambda: session.compose("nobody", [1])),
        (UnknownRequest, lambda: session.compose("nobody", [1], replace=True)),
        (UnknownRequest, lambda: session.begin("x", "nobody", [1])),
        (UnknownRequest, lambda: session.record("nobody", [1])),
        (RequestRunning, lambda: session.compose("live", [1])),
        (BadOffset, lambda: session.compose("root", [1], offset=-6)),
        (BadOffset, lambda: session.compose("root", [1], offset=-4, drop_previous_output=True)),
        (SessionFull, lambda: session.compose("root", [1] * 85)),
        (TurnExists, lambda: session.begin("live", None, [1])),
    ):
        with pytest.raises(refusal) as caught:
            call()
        assert caught.type is refusal
        assert picture(session) == before


def test_capacity_counts_what_a_replacement_leaves(session) -> None:
    session.begin("big", None, session.compose(None, [0] * 95))
    session.record("big", [1, 2, 3])  # What a running request says is never cut.
    assert session.held == 103
    with pytest.raises(SessionFull, match="holds 103 tokens, the request brings 1; 100"):
        session.compose(None, [1])
    assert session.compose(None, [1] * 100, replace=True) == [1] * 100
    with pytest.raises(SessionFull, match="holds 0 tokens"):
        session.compose(None, [1] * 101, replace=True)


def test_codes_and_fields_are_stable() -> None:
    found = [(kind.code, kind.param) for kind in (UnknownRequest, RequestRunning, BadOffset, SessionFull)]
    assert found == [
        ("request_not_found", "session_params.rid"),
        ("request_not_finished", "session_params.rid"),
        ("bad_offset", "session_params.offset"),
        ("session_full", "session_params.id"),
    ]


def test_every_refusal_has_a_status() -> None:
    for kind in (UnknownRequest, RequestRunning, BadOffset, SessionFull):
        assert kind.code in STATUS_OF_CODE
