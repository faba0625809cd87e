"""A conversation sent to a session that has it already: what is new is appended, nothing twice."""

import threading
from typing import Any

import pytest

from holdfast.server.link import wire
from tests.server.in_process import echo_commands
from tests.server.serving import Server

Message = dict[str, str]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


DEVELOPER = {"role": "developer", "content": "rules"}

REPEATED: dict[str, list[Message]] = {
    "all of it": [user("one"), assistant("one"), user("two")],
    "with its system message": [system("x"), user("one"), assistant("one"), user("two")],
    "its system message and what is new": [system("x"), user("two")],
    "its developer message and what is new": [DEVELOPER, user("two")],
    "its last answer and what is new": [assistant("one"), user("two")],
    "its last answer alone": [assistant("one")],
    "what is new, and an answer": [user("two"), assistant("three")],
}
DIFFERS: dict[str, int | None] = {
    "all of it": 0,
    "its system message and what is new": 1,
    "its developer message and what is new": 0,
    "its last answer and what is new": 0,
    "its last answer alone": 0,
    "what is new, and an answer": 0,
}
"""Which of the messages differs from the history, which is that of `x` and `one`."""
NEW: dict[str, list[Message]] = {
    "a message": [user("two")],
    "the same words again": [user("one")],
    "several": [user("two"), user("three")],
    "a message and a note": [user("two"), system("note")],
    "a note alone": [system("note")],
}
PATHS = {"/v1/chat/completions": "messages", "/v1/sessions/{}/turns": "input"}


def ask(server: Server, path: str, session: str, messages: list[Message], **fields: Any) -> tuple[int, Any]:
    body = {PATHS[path]: messages, **fields}
    if PATHS[path] == "messages":
        body["session_id"] = session
    answer = server.post(path.format(session), body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("path", PATHS)
def test_a_conversation_that_differs_is_refused_where_it_does_and_changes_nothing(
    echo: Server, path: str
) -> None:
    session = echo.open()
    assert ask(echo, path, session, [system("x"), user("one")])[0] == 200
    known = echo.state(session)["tokens"]["known"]
    for case, place in DIFFERS.items():
        status, answer = ask(echo, path, session, REPEATED[case])
        error, param = answer["error"], f"{PATHS[path]}[{place}]"
        assert (status, error["code"], error["param"]) == (409, "history_differs", param), case
        assert (
            error["message"].startswith(f"{param}: differs") and "send only new messages" in error["message"]
        )
    for messages in ([system("x"), user("one")], [system("x"), user("one"), assistant("on")]):
        status, answer = ask(echo, path, session, messages)
        assert (status, answer["error"]["code"]) == (409, "history_differs")
    state = echo.state(session)
    assert (state["tokens"]["known"], state["turns"]) == (known, 1)


@pytest.mark.parametrize("path", PATHS)
def test_a_conversation_that_goes_on_from_the_history_is_appended_as_the_difference(
    echo: Server, path: str
) -> None:
    session, plain = echo.open(), echo.open()
    messages = [system("x"), user("one")]
    assert ask(echo, path, session, messages)[0] == ask(echo, path, plain, messages)[0] == 200
    for said in ("two", "three", "name <|end|> it"):
        messages += [assistant(messages[-1]["content"]), user(said)]
        assert ask(echo, path, session, messages)[0] == ask(echo, path, plain, [user(said)])[0] == 200
        states = [echo.state(each) for each in (session, plain)]
        # The last token that was said is computed with the next turn, or a moment later.
        assert states[0]["tokens"]["known"] == states[1]["tokens"]["known"]
        assert states[0]["turns"] == states[1]["turns"]
    status, answer = ask(echo, path, session, [*messages[:-1], user("zwei"), assistant("x"), user("y")])
    assert (status, answer["error"]["param"]) == (409, f"{PATHS[path]}[7]")


def test_the_history_may_leave_out_the_system_text_that_the_session_was_opened_with(echo: Server) -> None:
    path, session = "/v1/chat/completions", echo.open(system="x")
    assert ask(echo, path, session, [user("one")])[0] == 200
    assert ask(echo, path, session, [user("one"), assistant("one"), user("two")])[0] == 200
    longer = [user("one"), assistant("one"), user("two"), assistant("two"), user("three")]
    assert ask(echo, path, session, [system("x"), *longer])[0] == 200
    status, answer = ask(echo, path, session, [user("one"), assistant("eins"), user("two")])
    assert (status, answer["error"]["param"]) == (409, "messages[1]")
    assert echo.state(session)["turns"] == 3


def test_an_answer_that_was_cut_goes_on_from_what_its_client_has(echo: Server) -> None:
    session = echo.open()
    echo.say(session, [user("one two three")], turn_id="t")
    assert (
        echo.post(f"/v1/sessions/{session}/interrupt", {"turn_id": "t", "keep_tokens": 7}).status_code == 200
    )
    said = [user("one two three"), assistant("one two"), user("go on")]
    status, answer = ask(echo, "/v1/chat/completions", session, said)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "go on")


@pytest.mark.parametrize("path", PATHS)
def test_what_is_new_is_appended(echo: Server, path: str) -> None:
    for case, messages in NEW.items():
        session = echo.open()
        assert ask(echo, path, session, [system("x"), user("one")])[0] == 200
        assert ask(echo, path, session, messages)[0] == 200, case
        assert echo.state(session)["turns"] == 2


@pytest.mark.parametrize("path", PATHS)
def test_a_conversation_may_open_a_session(echo: Server, path: str) -> None:
    for case, messages in {**REPEATED, **NEW}.items():
        assert ask(echo, path, echo.open(), messages)[0] == 200, case


@pytest.mark.parametrize("path", PATHS)
def test_whoever_asks_for_it_may_append_such_messages(echo: Server, path: str) -> None:
    session = echo.open(system="x")
    for turns, (case, messages) in enumerate(REPEATED.items(), 1):
        status, answer = ask(echo, path, session, messages, append_history=True)
        assert status == 200, (case, answer)
        assert echo.state(session)["turns"] == turns


@pytest.mark.parametrize("path", PATHS)
def test_a_session_that_was_opened_with_a_system_text_is_not_told_another(echo: Server, path: str) -> None:
    session = echo.open(system="x")
    status, answer = ask(echo, path, session, [system("x"), user("one")])
    assert (status, answer["error"]["code"]) == (400, "history_repeated")
    assert ask(echo, path, session, [user("one"), assistant("two"), user("three")])[0] == 200


def test_a_session_that_was_rewound_to_its_start_may_be_opened_again(echo: Server) -> None:
    session = echo.open()
    path = "/v1/chat/completions"
    assert ask(echo, path, session, [system("x"), user("one")])[0] == 200
    assert echo.post(f"/v1/sessions/{session}/rewind", {"to_turn": 0}).status_code == 200
    assert ask(echo, path, session, REPEATED["all of it"])[0] == 200


def test_a_first_turn_that_is_sent_again_by_its_id_is_answered_again(echo: Server) -> None:
    session = echo.open()
    first = echo.say(session, [system("x"), user("one")], turn_id="t-1")
    assert echo.say(session, [user("two")])["text"] == "two"
    again = echo.say(session, [system("x"), user("one")], turn_id="t-1")
    assert (again["text"], again["token_ids"]) == (first["text"], first["token_ids"])
    body = {"input": [system("y"), user("one")], "turn_id": "t-1"}
    assert echo.post(f"/v1/sessions/{session}/turns", body).json()["error"]["code"] == "turn_conflict"
    assert echo.state(session)["turns"] == 2


def test_of_two_that_open_a_session_at_once_one_does(echo: Server) -> None:
    for _ in range(5):
        session = echo.open()
        answers: list[tuple[int, Any]] = []

        def open_it(session: str = session, answers: list[tuple[int, Any]] = answers) -> None:
            answers.append(ask(echo, "/v1/chat/completions", session, [system("x"), user("one")]))

        threads = [threading.Thread(target=open_it) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert echo.state(session)["turns"] == [status for status, _ in answers].count(200) == 1
        codes = {answer["error"]["code"] for status, answer in answers if status != 200}
        assert codes <= {"session_busy", "history_repeated", "history_differs"}


def test_the_engine_decides_whether_there_is_a_history() -> None:
    commands = echo_commands()
    loop = commands.loop
    commands.receive(wire.OpenSession(1, "ann/s", "ann"))
    fields = wire.SamplingFields(max_tokens=1)
    commands.receive(wire.StartTurn(2, "t-2", "ann", [65], fields, session="ann/s", known=0, opens=True))
    while loop.busy:
        loop.step()
    assert [report.call for report in commands.take_reports() if isinstance(report, wire.Done)] == [1, 2]
    known = loop.scheduler.registry.find("ann/s").sequence.known
    # Written for a session without a history, and for one that has it.
    for call, tokens, written_for in ((3, [65], 0), (4, [], known)):
        commands.receive(
            wire.StartTurn(
                call, f"t-{call}", "ann", tokens, fields, session="ann/s", known=written_for, opens=True
            )
        )
        (declined,) = commands.take_reports()
        assert isinstance(declined, wire.Declined)
        assert (declined.call, declined.code) == (call, "history_repeated")
        assert declined.view is not None and declined.view.known == known
    # While a turn speaks, there may be a history or none in the end: the session is busy.
    talking = wire.SamplingFields(max_tokens=500, ignore_eos=True)
    commands.receive(wire.StartTurn(5, "t-5", "ann", [65], talking, session="ann/s", known=known))
    loop.step()
    commands.receive(wire.StartTurn(6, "t-6", "ann", [], fields, session="ann/s", known=known, opens=True))
    while commands.waits:
        loop.step()
        commands.retry()
    declines = [report for report in commands.take_reports() if isinstance(report, wire.Declined)]
    assert [(declined.call, declined.code) for declined in declines] == [(6, "session_busy")]
