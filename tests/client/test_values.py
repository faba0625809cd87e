"""The parts of the client that talk to nobody: events, retries, calls, errors and realtime bookkeeping."""

import json
import ssl

import pytest

from holdfast.client import (
    AnswerChanged,
    BadArgument,
    BadRequest,
    Client,
    Conflict,
    ConnectionFailed,
    Expired,
    Forbidden,
    HoldfastError,
    NotFound,
    ProtocolError,
    Retries,
    ServerFault,
    SessionView,
    ToolCall,
    TooManyRequests,
    TurnEvent,
    TurnEventKind,
    TurnFailed,
    Unauthorized,
    Unavailable,
    Usage,
    calls,
)
from holdfast.client.dialogue import Dialogue, RealtimeEvent
from holdfast.client.errors import error_from_body, error_from_response
from holdfast.client.retry import Attempts
from holdfast.client.stream import Event, EventDecoder, TurnReader
from holdfast.client.transport import Transport
from holdfast.server.http.problems import TYPE_OF_STATUS
from tests.client.scripted import delta, done, result, spoken

AT_ONCE = Retries(attempts=4, first_seconds=0.0, longest_seconds=0.0)


def events(*chunks: bytes) -> list[Event]:
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


def test_events_do_not_depend_on_the_borders_between_chunks() -> None:
    whole = delta("a\u2028b\x85c\x0b\N{GREEK SMALL LETTER ALPHA}", 1) + b": a comment\r\n\r\n" + done("x", 2)
    expected = events(whole)
    assert [event.name for event in expected] == ["delta", "done"]
    assert expected[0].body()["text"] == "a\u2028b\x85c\x0b\N{GREEK SMALL LETTER ALPHA}"
    for size in (1, 2, 3, 7):
        assert events(*(whole[at : at + size] for at in range(0, len(whole), size))) == expected


def test_events_of_several_lines_and_without_a_name() -> None:
    assert events(b"data: one\ndata:two\n\n", b"event: x\n\n") == [Event("message", "one\ntwo")]


@pytest.mark.parametrize("data", [b"event: delta\ndata: [1]\n\n", b"event: delta\ndata: {\n\n"])
def test_events_that_are_not_understood(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        TurnReader().hear(events(data)[0])


def read(reader: TurnReader, *chunks: bytes) -> str:
    """The new text."""
    return "".join(each.text for each in told(reader, *chunks) if each.kind is TurnEventKind.TEXT)


def told(reader: TurnReader, *chunks: bytes) -> list[TurnEvent]:
    return [each for event in events(*chunks) for each in reader.hear(event)]


def test_a_turn_is_its_pieces() -> None:
    reader = TurnReader()
    assert read(reader, delta("one ", 1), delta("two", 2, 3)) == "one two"
    assert (reader.tokens_shown, reader.result) == (3, None)
    assert read(reader, done("one two.", 1, 2, 3, 4)) == "."
    assert reader.tokens_shown == 4


def test_a_stream_that_begins_again_goes_on_where_it_was() -> None:
    reader = TurnReader()
    read(reader, delta("one ", 1), delta("two ", 2))
    reader.reopen()
    assert read(reader, delta("one two three", 1, 2, 3)) == "three"
    assert reader.token_ids == [1, 2, 3]
    reader.reopen()
    assert read(reader, done("one two three four", 1, 2, 3, 4)) == " four"


def test_an_answer_that_has_changed_is_not_glued_on() -> None:
    for again in (delta("one too", 1, 9), done("one too", 1, 9)):
        reader = TurnReader()
        read(reader, delta("one two", 1, 2))
        reader.reopen()
        with pytest.raises(AnswerChanged):
            read(reader, again)


def test_a_turn_that_was_cut_says_less_than_was_shown() -> None:
    reader = TurnReader()
    read(reader, delta("one two", 1, 2))
    assert read(reader, done("one", 1, finish_reason="abort")) == ""
    assert reader.result is not None
    assert (reader.result.text, reader.result.finish_reason) == ("one", "abort")


def test_a_turn_that_was_over_before_it_was_cut() -> None:
    """The server had finished it; the words were read only in part."""
    whole = done("one two three", 1, 2, 3)
    for kept, text in ((0, ""), (1, "one "), (2, "one two ")):
        reader = TurnReader()
        read(reader, delta("one ", 1), delta("two ", 2))
        reader.cut(kept)
        assert read(reader, delta("three", 3), whole) == "three"
        assert reader.result is not None
        assert (reader.result.text, reader.result.token_ids) == (text, (1, 2, 3)[:kept])
        assert (reader.result.finish_reason, reader.result.usage.completion_tokens) == ("abort", kept)
        late = TurnReader()
        read(late, delta("one ", 1), delta("two ", 2), whole)
        late.cut(kept)
        assert late.result == reader.result


CALLING = [
    spoken("reasoning.delta", text="Hm", index=0, token_ids=[1]),
    spoken("reasoning.delta", text="m.", index=1, token_ids=[2]),
    spoken("delta", text="Wait. ", index=2, token_ids=[3]),
    spoken("delta", text="", index=3, token_ids=[4], settled_tokens=3),
    spoken("tool_call", index=0, id="call_a", name="look", token_ids=[5], settled_tokens=3),
    spoken("tool_call.delta", index=0, arguments='{"at"', token_ids=[6], settled_tokens=3),
    spoken("tool_call.delta", index=0, arguments=": 1}", token_ids=[7]),
    spoken(
        "tool_call.done",
        index=0,
        id="call_a",
        name="look",
        arguments='{"at": 1}',
        outcome="complete",
        token_ids=[],
    ),
]
LOOK = ToolCall("call_a", "look", '{"at": 1}')
SHOWN_LOOK = {"id": "call_a", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


def calling_done() -> bytes:
    body = {
        **result("Wait. ", *range(1, 9), finish_reason="tool_calls"),
        "reasoning": "Hmm.",
        "tool_calls": [SHOWN_LOOK],
    }
    return spoken("done", **body)


def parts(heard: list[TurnEvent]) -> dict[TurnEventKind, str]:
    """The texts by kind, and the names of calls begun and done."""
    kinds = {kind: "".join(each.text for each in heard if each.kind is kind) for kind in TurnEventKind}
    for kind in (TurnEventKind.CALL, TurnEventKind.CALL_DONE):
        kinds[kind] = " ".join(
            each.call.name for each in heard if each.kind is kind and each.call is not None
        )
    return kinds


WHOLE = {
    TurnEventKind.TEXT: "Wait. ",
    TurnEventKind.REASONING: "Hmm.",
    TurnEventKind.CALL: "look",
    TurnEventKind.ARGUMENTS: '{"at": 1}',
    TurnEventKind.CALL_DONE: "look",
}


def test_reasoning_and_calls_are_events_of_their_own() -> None:
    reader = TurnReader()
    heard = told(reader, *CALLING)
    assert parts(heard) == WHOLE
    assert heard[-1].call == LOOK and heard[-1].outcome == "complete"
    assert told(reader, calling_done()) == []
    assert reader.result is not None
    assert (reader.result.reasoning, reader.result.tool_calls) == ("Hmm.", (LOOK,))
    assert LOOK.parsed() == {"at": 1}


@pytest.mark.parametrize("broken_at", range(len(CALLING) + 1))
def test_a_stream_with_calls_that_begins_again(broken_at: int) -> None:
    """Also if it comes in fewer events, or only as a result: everything is told once."""
    for again in (CALLING, []):
        reader = TurnReader()
        heard = told(reader, *CALLING[:broken_at])
        reader.reopen()
        heard += told(reader, *again, calling_done())
        assert parts(heard) == WHOLE
        assert reader.token_ids == list(range(1, 9))


def test_another_call_is_another_answer() -> None:
    reader = TurnReader()
    told(reader, *CALLING)
    reader.reopen()
    with pytest.raises(AnswerChanged):
        told(reader, *CALLING[:4], spoken("tool_call", index=0, id="call_b", name="sing", token_ids=[5]))


def test_what_was_heard_has_no_half_a_call() -> None:
    reader = TurnReader()
    settled = []
    for event in CALLING:
        told(reader, event)
        settled.append(reader.tokens_settled)
    assert settled == [1, 2, 3, 3, 3, 3, 7, 7] and reader.tokens_shown == 7


@pytest.mark.parametrize(
    ("kept", "text", "reasoning", "called"),
    [(1, "", "Hm", 0), (3, "Wait. ", "Hmm.", 0), (7, "Wait. ", "Hmm.", 1)],
)
def test_a_turn_with_calls_that_was_cut(kept: int, text: str, reasoning: str, called: int) -> None:
    reader = TurnReader()
    told(reader, *CALLING, calling_done())
    reader.cut(kept)
    assert reader.result is not None
    assert (reader.result.text, reader.result.reasoning) == (text, reasoning)
    assert len(reader.result.tool_calls) == called


@pytest.mark.parametrize(
    "event",
    [
        spoken("tool_call", id="call_a", name="look"),
        spoken("tool_call", index=0, name="look"),
        spoken("tool_call.delta", index=0, arguments="{}"),
        spoken("tool_call.done", index=3, outcome="complete"),
    ],
)
def test_events_of_calls_that_make_no_sense(event: bytes) -> None:
    with pytest.raises(ProtocolError):
        told(TurnReader(), event)


@pytest.mark.parametrize("arguments", ["{", "[]"])
def test_arguments_that_are_not_an_object(arguments: str) -> None:
    with pytest.raises(ProtocolError, match="arguments of look"):
        ToolCall("call_a", "look", arguments).parsed()


def test_tool_results_are_messages() -> None:
    assert calls.tool_messages({"a": "text", "b": {"degrees": 21.5}, "c": [1], "d": None}) == [
        {"role": "tool", "tool_call_id": "a", "content": "text"},
        {"role": "tool", "tool_call_id": "b", "content": '{"degrees": 21.5}'},
        {"role": "tool", "tool_call_id": "c", "content": "[1]"},
        {"role": "tool", "tool_call_id": "d", "content": "null"},
    ]
    with pytest.raises(BadArgument):
        calls.tool_messages({})
    with pytest.raises(BadArgument):
        calls.tool_messages({"a": [float("nan")]})


def test_fields_of_the_answer_are_not_sampling() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    options, sampling = calls.turn_fields(
        {"tools": tools, "tool_choice": "required", "max_tokens": 5, "timeout": 1.0}
    )
    assert options == {"tools": tools, "tool_choice": "required", "timeout": 1.0}
    assert sampling == {"max_tokens": 5}
    opened = calls.open_session("s", None, None, None, tools)
    assert opened.body == {"id": "s", "tools": tools}


def test_an_error_inside_a_stream() -> None:
    body = json.dumps({"turn_id": "t", "error": {"message": "no", "type": "t", "code": "numeric_error"}})
    with pytest.raises(TurnFailed, match="no") as caught:
        read(TurnReader(), delta("one", 1), f"event: error\ndata: {body}\n\n".encode())
    assert caught.value.code == "numeric_error"


@pytest.mark.parametrize(("status", "type_"), sorted(TYPE_OF_STATUS.items()))
def test_a_refusal_inside_a_stream_is_what_its_status_would_be(status: int, type_: str) -> None:
    """What the server calls an error says as much as the status that it would have answered with."""
    body = {"error": {"message": "no", "type": type_, "code": "some_code"}}
    answered = error_from_response(status, json.dumps(body).encode(), {})
    streamed = error_from_body(body["error"])
    assert type(streamed) is (TurnFailed if status == 500 else type(answered))
    assert (streamed.code, streamed.type, str(streamed)) == ("some_code", type_, "no")


def test_a_mistake_of_the_servers_is_no_failed_turn() -> None:
    wrong = error_from_body({"message": "no", "type": "server_error", "code": "internal_error"})
    assert type(wrong) is ServerFault


def test_only_an_error_has_an_error() -> None:
    assert RealtimeEvent("session.rewound", 3, {"type": "session.rewound", "turns": 0}).error is None
    refused = {"message": "nothing was appended", "type": "invalid_request_error", "code": "empty_turn"}
    wrong = RealtimeEvent("error", 4, {"type": "error", "error": refused}).error
    assert isinstance(wrong, BadRequest)
    assert (wrong.code, str(wrong)) == ("empty_turn", "nothing was appended")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest), (401, Unauthorized), (403, Forbidden), (404, NotFound), (409, Conflict),
        (410, Expired), (413, BadRequest), (429, TooManyRequests), (500, ServerFault), (503, Unavailable),
    ],
)  # fmt: skip
def test_errors_are_typed_and_carry_what_was_said(status: int, kind: type[HoldfastError]) -> None:
    said = {"error": {"message": "why", "type": "ty", "code": "co", "param": "pa"}}
    error = error_from_response(status, json.dumps(said).encode(), {"x-request-id": "r", "retry-after": "2"})
    assert type(error) is kind
    assert (str(error), error.status, error.type, error.code, error.param) == (
        "why",
        status,
        "ty",
        "co",
        "pa",
    )
    assert (error.request_id, error.retry_after) == ("r", 2.0)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": 1}', b"\xff"])
def test_errors_of_other_services_are_errors_too(body: bytes) -> None:
    error = error_from_response(502, body, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"})
    assert (type(error), error.status, error.code, error.retry_after) == (ServerFault, 502, None, None)


def test_waits_double_up_to_a_limit_and_obey_the_server() -> None:
    retries = Retries(attempts=9, first_seconds=1.0, longest_seconds=10.0)
    assert [retries.pause(failures, None, 1.0) for failures in (1, 2, 3, 4, 5, 99)] == [1, 2, 4, 8, 10, 10]
    assert retries.pause(3, None, 0.0) == 2.0
    assert retries.pause(1, 7.0, 0.5) == 7.0
    assert retries.pause(1, 3600.0, 0.5) == 10.0
    with pytest.raises(ValueError, match="attempts"):
        Retries(attempts=0)


def test_what_is_tried_again() -> None:
    for error in (ConnectionFailed("x"), TooManyRequests("x"), Unavailable("x")):
        attempts = Attempts(AT_ONCE)
        assert [attempts.after(error) for _ in range(3)] == [0.0, 0.0, 0.0]
        with pytest.raises(type(error)):
            attempts.after(error)
    for error in (BadRequest("x"), NotFound("x"), ServerFault("x"), ProtocolError("x")):
        with pytest.raises(type(error)):
            Attempts(AT_ONCE).after(error)


def test_a_conflict_is_tried_again_only_with_an_attempt_of_ones_own() -> None:
    busy = Conflict("x", code="session_busy")
    with pytest.raises(Conflict):
        Attempts(AT_ONCE).after(busy)
    attempts = Attempts(AT_ONCE)
    attempts.after(ConnectionFailed("x"))
    assert attempts.after(busy) == 0.0
    with pytest.raises(Conflict):
        attempts.after(Conflict("x", code="turn_conflict"))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://a:1", "http://a:1"), ("http://a:1/", "http://a:1"), ("https://a/v1/", "https://a"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
    ],
)  # fmt: skip
def test_addresses(given: str, meant: str) -> None:
    assert calls.base_url(given) == meant


def test_clients_share_what_they_trust() -> None:
    first, second = (Transport("https://a", None, AT_ONCE, 1.0) for _ in range(2))
    plain = Transport("http://a", None, AT_ONCE, 1.0)
    trusted, nobody = first.settings["verify"], plain.settings["verify"]
    assert second.settings["verify"] is trusted
    assert trusted.cert_store_stats()["x509_ca"] > 0
    assert nobody.cert_store_stats()["x509_ca"] == 0
    assert trusted.verify_mode == nobody.verify_mode == ssl.CERT_REQUIRED
    for each in (first, second, plain):
        each.http.close()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a",
        "http://a:many",
        "http://a:99999",
        "http://[::1",
        "http://:80",
        "",
        "http://a..b",
        "http://a\ud800",
    ],
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="http"):
        calls.base_url(url)
    with pytest.raises(HoldfastError, match="the address of a server"):
        Client(url)


def test_everything_that_is_raised_is_of_one_family() -> None:
    with pytest.raises(BadArgument, match="printable ASCII"):
        Client("http://127.0.0.1:1", "kéy")
    with pytest.raises(BadArgument, match="attempts"):
        Retries(attempts=0)
    for said in ([1.5], 5, None):
        with pytest.raises(BadArgument, match="say text"):
            calls.input_of(said)  # type: ignore[arg-type]
    assert issubclass(BadArgument, HoldfastError)


@pytest.mark.parametrize("value", ["\ud800", float("nan"), float("inf"), object(), {"a"}])
def test_what_json_cannot_hold_is_refused_and_not_sent(value: object) -> None:
    client = Client("http://127.0.0.1:1", retries=Retries(attempts=1))
    with client, pytest.raises(BadArgument, match="cannot be sent"):
        client.session(metadata={"a": value})  # type: ignore[dict-item]
    dialogue = Dialogue("s-1")
    dialogue.append("hello")
    with pytest.raises(BadArgument, match="cannot be sent"):
        dialogue.commit(None, "after", {"stop": value})  # type: ignore[typeddict-item]
    assert len(dialogue.pending) == 1, "it would be said again with every new connection"


def test_who_is_closed_says_so() -> None:
    client = Client("http://127.0.0.1:1")
    client.close()
    with pytest.raises(BadArgument, match="the client is closed"):
        client.models()


def test_calls_carry_ids_and_leave_open_what_was_not_said() -> None:
    turn = calls.start_turn("s/1", "hi", {"on_abort": "keep", "timeout": None}, turn_id=None)
    assert turn.path == "/v1/sessions/s%2F1/turns"
    assert turn.body is not None
    assert turn.body.pop("turn_id").startswith("t-")
    assert turn.body == {"input": "hi", "sampling": {}, "stream": True, "on_abort": "keep"}
    turn = calls.start_turn("s", "hi", {"append_history": True, "timeout": 2.5, "seed": 1}, turn_id=None)
    assert turn.body is not None and turn.body["append_history"] is True
    assert (turn.body["timeout"], turn.body["sampling"]) == (2.5, {"seed": 1})
    opened = calls.open_session(None, None, None, None)
    assert opened.body is not None
    assert opened.body.keys() == {"id"}
    assert calls.sampling_fields({"logit_bias": {3: 1.0}}) == {"logit_bias": {"3": 1.0}}


def test_what_can_be_said() -> None:
    message = {"role": "user", "content": "x"}
    assert (calls.input_of("x"), calls.input_of((1, 2)), calls.input_of([message])) == (
        "x",
        [1, 2],
        [message],
    )
    with pytest.raises(TypeError):
        calls.input_of([1, message])  # type: ignore[list-item]


def test_what_an_interruption_keeps() -> None:
    assert calls.keep_fields("heard", 4) == {"keep_tokens": 4}
    assert calls.keep_fields("heard", None) == {"keep": "all"}
    assert calls.keep_fields("none", 4) == {"keep": "none"}
    assert calls.keep_fields(0, 4) == {"keep_tokens": 0}


def test_values_read_what_is_there_and_ignore_the_rest() -> None:
    view = SessionView.from_body(
        {"id": "s", "state": "IDLE", "turns": 2, "tokens": {"known": 5, "computed": 4}, "colour": "red"}
    )
    assert (view.turns, view.tokens_known, view.tokens_computed, view.ttl) == (2, 5, 4, None)
    openai = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    assert Usage.from_body(openai) == Usage(9, 4, 5, 2)
    with pytest.raises(ProtocolError):
        SessionView.from_body({"id": "s"})


def said(kind: str, seq: int, **fields: object) -> str:
    return json.dumps({"type": kind, "seq": seq, **fields})


def test_a_rewind_that_nobody_answered_is_said_again_and_heard_once() -> None:
    dialogue = Dialogue("s-1", last_seq=1)
    rewind, fork = dialogue.rewind(2), dialogue.fork("child", None)
    assert dialogue.pending == [rewind, fork]
    assert dialogue.hear(said("session.forked", 2, request_id=fork["request_id"])) is not None
    assert dialogue.pending == [rewind], "what others asked for answers nothing else"
    append, commit = dialogue.append("hello"), dialogue.commit("t-1", "after", {"on_abort": "keep"})
    assert dialogue.catching_up() == [dialogue.opening(), rewind, append, commit]
    # The first answer had been on its way; the second one says nothing new.
    assert dialogue.hear(said("session.rewound", 3, request_id=rewind["request_id"])) is not None
    assert dialogue.pending == [append, commit]
    assert dialogue.hear(said("session.rewound", 4, request_id=rewind["request_id"])) is None
    assert dialogue.last_seq == 4
    assert dialogue.hear(said("session.rewound", 5, request_id="r-of-others")) is not None
    refused = dialogue.rewind(9)
    error = {"code": "no_such_turn", "message": "there are 2"}
    again = dialogue.rewind(1)
    assert dialogue.hear(said("error", 6, error=error, request_id=refused["request_id"])) is not None
    assert dialogue.pending == [append, commit, again]
    late = dialogue.commit("t-2", "after", {"on_abort": "keep"})
    assert dialogue.hear(said("error", 7, error=error, turn_id="t-2")) is not None
    assert dialogue.pending == [again] and late not in dialogue.pending, "the rewind has yet to be answered"


def test_a_dialogue_remembers_what_to_say_again() -> None:
    dialogue = Dialogue("s-1")
    assert dialogue.opening() == {"type": "session.open", "id": "s-1"}
    append, commit = (
        dialogue.append("hello"),
        dialogue.commit("t-1", "after", {"on_abort": "keep", "max_tokens": 3}),
    )
    assert (commit["sampling"], commit["on_abort"]) == ({"max_tokens": 3}, "keep")
    more = dialogue.append([4, 5])
    assert more == {"type": "input.append", "token_ids": [4, 5]}
    assert dialogue.pending == [append, commit, more]
    assert dialogue.hear(said("response.started", 2, turn_id="t-1")) is not None
    assert dialogue.pending == [more]
    dialogue.hear(said("response.delta", 3, turn_id="t-1", index=0, text="he", token_ids=[1, 2]))
    assert dialogue.hear(said("response.delta", 3, turn_id="t-1", index=0, text="he", token_ids=[1])) is None
    assert dialogue.interrupt("heard", None) == {
        "type": "response.interrupt", "turn_id": "t-1", "keep_tokens": 2,
    }  # fmt: skip
    assert dialogue.opening() == {"type": "session.open", "id": "s-1", "resume_after_seq": 3}
    ended = dialogue.hear(json.dumps({"type": "response.done", "seq": 4, **result("he", 1, 2)}))
    assert ended is not None
    assert ended.result.text == ended.text == "he"
    with pytest.raises(ProtocolError):
        dialogue.hear("[]")
    with pytest.raises(ValueError, match="nothing to interrupt"):
        Dialogue("s").interrupt("all", None)
