"""How dialects write reasoning and tool calls, from deltas and ends made by hand."""

import asyncio
from typing import Any

import msgspec
import pytest

from holdfast.engine.echo import echo_tokenizer
from holdfast.engine.sampling import Sampling
from holdfast.server.answer_parts import finish_reason
from holdfast.server.http.problems import turn_failed
from holdfast.server.link import wire
from holdfast.server.link.turn_feed import TurnFeed, join
from holdfast.server.routes.openai_format import Chat, Completion
from holdfast.server.routes.session_format import TurnEvent, TurnEvents, shown_turn
from holdfast.server.telemetry.metrics import Metrics

TEXT, REASONING, CALL, ARGUMENTS, CALL_END = wire.Part
COMPLETE = wire.CallFields("call_a", "look", '{"at": 1}')
SECOND = wire.CallFields("call_b", "sing", "{}")
BROKEN = wire.CallFields("call_c", "look", '{"at": ', "broken")
CUT = wire.CallFields("call_d", "look", '{"a', "cut")


def event(part: wire.Part, text: str, index: int = 0, call_id: str = "") -> wire.AnswerEvent:
    return wire.AnswerEvent(part, text, index, call_id)


def delta(index: int, tokens: list[int], *events: wire.AnswerEvent, logprobs: bool = False) -> wire.Delta:
    text = "".join(each.text for each in events if each.part is TEXT)
    entries = [wire.Logprob(token, -1.0) for token in tokens] if logprobs else None
    return wire.Delta(1, index, text, tokens, entries, events=list(events))


def end(
    text: str = "",
    *calls: wire.CallFields,
    reason: str = "stop",
    outcome: str = "finished",
    reasoning: str = "",
    view: wire.SessionView | None = None,
) -> wire.End:
    answer = wire.AnswerParts(reasoning, list(calls), len(reasoning))
    timing: dict[str, Any] = {"queue_seconds": 0.0, "first_seconds": 0.0, "total_seconds": 0.0}
    return wire.End(
        turn=1,
        outcome=outcome,
        reason=reason,
        text=text,
        tokens=[1, 2, 3],
        prompt_tokens=5,
        cached_tokens=0,
        computed_tokens=5,
        view=view,
        answer=answer,
        **timing,
    )


ROUND = [
    delta(0, [10], event(REASONING, "Hm")),
    delta(1, [11], event(REASONING, "m.")),
    delta(2, [12]),
    delta(3, [13, 14], event(TEXT, "Let me "), event(TEXT, "see.")),
    delta(5, [15], event(CALL, "look", 0, "call_a")),
    delta(6, [16], event(ARGUMENTS, '{"at":', 0)),
    delta(7, [17], event(ARGUMENTS, " 1}", 0), event(CALL_END, "complete", 0)),
    delta(
        8, [18], event(CALL, "sing", 1, "call_b"), event(ARGUMENTS, "{}", 1), event(CALL_END, "complete", 1)
    ),
]
"""An answer of two calls, step by step."""


def chat() -> Chat:
    return Chat("chatcmpl-1", "echo", "f", echo_tokenizer())


@pytest.fixture(params=range(1, len(ROUND) + 1))
def pieces(request: pytest.FixtureRequest) -> list[wire.Delta]:
    """The answer, joined for readers of every slowness."""
    size = request.param
    return [join(ROUND[place : place + size]) for place in range(0, len(ROUND), size)]


# --- joining --------------------------------------------------------------------------------------


def test_adjacent_pieces_of_a_part_are_joined() -> None:
    joined = join(ROUND)
    assert joined.tokens == list(range(10, 19)) and joined.text == "Let me see."
    assert joined.events == [
        event(REASONING, "Hmm."),
        event(TEXT, "Let me see."),
        event(CALL, "look", 0, "call_a"),
        event(ARGUMENTS, '{"at": 1}', 0),
        event(CALL_END, "complete", 0),
        event(CALL, "sing", 1, "call_b"),
        event(ARGUMENTS, "{}", 1),
        event(CALL_END, "complete", 1),
    ]


def test_pieces_of_different_calls_stay_apart() -> None:
    first, second = event(ARGUMENTS, "{}", 0), event(ARGUMENTS, "[]", 1)
    assert join([delta(0, [1], first), delta(1, [2], second)]).events == [first, second]
    begins = [event(CALL, "a", 0, "x"), event(CALL, "b", 1, "y")]
    assert join([delta(0, [1], begins[0]), delta(1, [2], begins[1])]).events == begins


def test_deltas_that_are_not_read_have_no_events() -> None:
    plain = [wire.Delta(1, place, "x", [place]) for place in range(3)]
    assert join(plain).events is None and join(plain).text == "xxx"


# --- OpenAI ---------------------------------------------------------------------------------------


def test_a_whole_chat_answer() -> None:
    choice = chat().choice(0, end("", COMPLETE, SECOND, reasoning="Hmm."))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "Hmm.",
        "reasoning": "Hmm.",
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
            {"id": "call_b", "type": "function", "function": {"name": "sing", "arguments": "{}"}},
        ],
    }


def test_content_beside_calls_and_without_any() -> None:
    assert chat().choice(0, end("Wait.", COMPLETE))["message"]["content"] == "Wait."
    said = chat().choice(0, end(""))["message"]
    assert said == {"role": "assistant", "content": "", "refusal": None}


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (end("", COMPLETE), "tool_calls"),
        (end("", COMPLETE, reason="length"), "tool_calls"),
        (end("", COMPLETE, CUT, reason="length"), "length"),
        (end("", CUT, reason="length"), "length"),
        (end("", BROKEN), "stop"),
        (end("", BROKEN, COMPLETE), "tool_calls"),
        (end("", COMPLETE, CUT), "tool_calls"),
        (end("x"), "stop"),
        (end("x", reason="length"), "length"),
        (end("", COMPLETE, outcome="aborted"), "abort"),
    ],
)
def test_why_a_turn_ended(ended: wire.End, reason: str) -> None:
    assert finish_reason(ended) == reason
    (chunk,) = chat().last(0, ended)
    assert chunk["choices"][0]["finish_reason"] == reason


def test_calls_that_are_broken_or_cut_are_listed_as_they_are() -> None:
    message = chat().choice(0, end("", BROKEN, CUT, reason="length"))["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"at": ', '{"a']


def test_a_streamed_chat_answer(pieces: list[wire.Delta]) -> None:
    """However it is cut, the chunks add up to the answer: names first, then pieces of arguments."""
    form = chat()
    (opening,) = form.first(0, reads=True)
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": None}
    said = [chunk["choices"][0]["delta"] for piece in pieces for chunk in form.chunks(0, piece)]
    assert "".join(each.get("reasoning_content", "") for each in said) == "Hmm."
    assert "".join(each.get("reasoning", "") for each in said) == "Hmm."
    assert "".join(each.get("content", "") for each in said) == "Let me see."
    calls: list[dict[str, Any]] = []
    for each in said:
        for call in each.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                assert call["function"]["arguments"] == ""
                calls.append({"id": call["id"], **call["function"]})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert calls == [
        {"id": "call_a", "name": "look", "arguments": '{"at": 1}'},
        {"id": "call_b", "name": "sing", "arguments": "{}"},
    ]


def test_reasoning_in_one_piece(pieces: list[wire.Delta]) -> None:
    form = Chat("chatcmpl-1", "echo", "f", echo_tokenizer(), stream_reasoning=False)
    said = [chunk["choices"][0]["delta"] for piece in pieces for chunk in form.chunks(0, piece)]
    thoughts = [place for place, each in enumerate(said) if "reasoning" in each]
    assert thoughts == [0] and said[0]["reasoning"] == "Hmm."
    assert len(form.last(0, end("x"))) == 1
    form.chunks(1, delta(0, [1], event(REASONING, "on and ")))
    form.chunks(1, delta(1, [1], event(REASONING, "on")))
    cut = [chunk["choices"][0] for chunk in form.last(1, end("", reason="length"))]
    assert cut[0]["delta"]["reasoning_content"] == "on and on" and cut[1]["finish_reason"] == "length"


def test_log_probabilities_come_once_with_their_tokens() -> None:
    form = chat()
    held = form.chunks(0, delta(0, [10], logprobs=True))
    assert [chunk["choices"][0]["delta"] for chunk in held] == [{}]
    several = form.chunks(0, delta(1, [11, 12], event(REASONING, "a"), event(TEXT, "b"), logprobs=True))
    counts = [len((chunk["choices"][0]["logprobs"] or {"content": []})["content"]) for chunk in several]
    assert counts == [2, 0]
    assert form.chunks(0, delta(3, [13])) == []


def test_plain_answers_stream_as_before() -> None:
    form = chat()
    assert form.first(0, reads=False)[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    plain = wire.Delta(1, 0, "abc", [1])
    assert [chunk["choices"][0]["delta"] for chunk in form.chunks(0, plain)] == [{"content": "abc"}]
    assert form.chunks(0, wire.Delta(1, 0, "", [1])) == []
    completion = Completion("cmpl-1", "echo", "f", echo_tokenizer(), Sampling())
    assert completion.first(0, reads=False) == []
    assert [chunk["choices"][0]["text"] for chunk in completion.chunks(0, plain)] == ["abc"]


def test_reasoning_is_counted_in_usage() -> None:
    ends = [end("a", reasoning="1234"), end("b", reasoning="56")]
    usage = chat().usage(ends, 2)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 6)
    plain = msgspec.structs.replace(end("a"), answer=None)
    assert "completion_tokens_details" not in chat().usage([plain], 1)


# --- sessions -------------------------------------------------------------------------------------


def test_the_events_of_a_turn(pieces: list[wire.Delta]) -> None:
    """Every token once, in order; every part in its own events."""
    events = TurnEvents("t1")
    told = [each for piece in pieces for each in events.of(piece)]
    assert all(body["turn_id"] == "t1" for _, body in told)
    assert [token for _, body in told for token in body["token_ids"]] == list(range(10, 19))

    def joined(kind: TurnEvent, field: str) -> str:
        return "".join(body[field] for each, body in told if each is kind)

    assert joined(TurnEvent.DELTA, "text") == "Let me see."
    assert joined(TurnEvent.REASONING, "text") == "Hmm."
    begins = [body for kind, body in told if kind is TurnEvent.CALL]
    assert [(body["index"], body["id"], body["name"]) for body in begins] == [
        (0, "call_a", "look"),
        (1, "call_b", "sing"),
    ]
    assert joined(TurnEvent.ARGUMENTS, "arguments") == '{"at": 1}{}'
    done = [body for kind, body in told if kind is TurnEvent.CALL_DONE]
    assert [(body["id"], body["name"], body["arguments"], body["outcome"]) for body in done] == [
        ("call_a", "look", '{"at": 1}', "complete"),
        ("call_b", "sing", "{}", "complete"),
    ]
    heard = 0
    for kind, body in told:
        if kind in (TurnEvent.DELTA, TurnEvent.REASONING):
            assert body["index"] == heard
        heard += len(body["token_ids"])


def test_tokens_of_a_call_that_has_not_ended_are_not_settled() -> None:
    events = TurnEvents("t1")
    inside = wire.Delta(1, 4, "", [7], events=[event(ARGUMENTS, "{")], settled=3)
    ((_, body),) = events.of(inside)
    assert (body["token_ids"], body["settled_tokens"]) == ([7], 3)
    after = wire.Delta(1, 5, "", [8], events=[event(ARGUMENTS, "}"), event(CALL_END, "complete")], settled=6)
    assert all("settled_tokens" not in body for _, body in events.of(after))
    assert join([inside, after]).settled == 6


def test_plain_deltas_are_as_before() -> None:
    plain = wire.Delta(1, 4, "abc", [7], [wire.Logprob(7, -0.5)])
    assert list(TurnEvents("t1").of(plain)) == [
        (
            TurnEvent.DELTA,
            {
                "turn_id": "t1",
                "index": 4,
                "text": "abc",
                "token_ids": [7],
                "logprobs": [{"token_id": 7, "logprob": -0.5, "top": []}],
            },
        )
    ]


class Ended:
    """A feed that is over."""

    def __init__(self, ended: wire.End) -> None:
        self.end = ended
        self.replayed = False


def whole(ended: wire.End) -> dict[str, Any]:
    feed: Any = Ended(ended)
    return shown_turn("t1", feed)


def test_a_whole_turn() -> None:
    shown = whole(end("Wait.", COMPLETE, BROKEN, reasoning="Hmm."))
    assert shown["text"] == "Wait." and shown["reasoning"] == "Hmm."
    assert shown["finish_reason"] == "tool_calls" and shown["usage"]["reasoning_tokens"] == 4
    assert [call["id"] for call in shown["tool_calls"]] == ["call_a"]
    assert [(call["id"], call["outcome"]) for call in shown["incomplete_tool_calls"]] == [
        ("call_c", "broken")
    ]
    nothing = whole(end("Wait."))
    assert nothing["reasoning"] is None and nothing["tool_calls"] == []
    assert "incomplete_tool_calls" not in nothing
    assert "tool_calls" not in whole(msgspec.structs.replace(end("x"), answer=None))


def test_a_turn_that_was_rolled_back_has_no_calls() -> None:
    shown = whole(end("x", COMPLETE, outcome="aborted", reason="interrupt", reasoning="Hm"))
    assert shown["text"] == "" and "tool_calls" not in shown and shown["finish_reason"] == "abort"
    view = wire.SessionView("a/s", 8, 3, 1)
    kept = whole(end("x", COMPLETE, outcome="aborted", reason="interrupt", view=view))
    assert [call["id"] for call in kept["tool_calls"]] == ["call_a"] and kept["text"] == "x"


def test_a_feed_knows_whether_its_answer_is_read() -> None:
    sampling = wire.SamplingFields()

    async def made() -> tuple[bool, bool]:
        plain = wire.StartTurn(1, "t", "a", [1], sampling)
        read = msgspec.structs.replace(plain, answer=wire.AnswerFields(calls="hermes"))
        return TurnFeed(plain, lambda _: None).reads, TurnFeed(read, lambda _: None).reads

    assert asyncio.run(made()) == (False, True)


def test_reasoning_and_calls_are_counted() -> None:
    metrics = Metrics()
    feed: Any = Ended(end("", COMPLETE, BROKEN, COMPLETE, reasoning="Hmm."))
    metrics.turn_ended(feed)
    page = metrics.page().decode()
    assert "holdfast_reasoning_tokens_total 4.0" in page
    assert 'holdfast_tool_calls_total{outcome="complete"} 2.0' in page
    assert 'holdfast_tool_calls_total{outcome="broken"} 1.0' in page


def test_a_turn_whose_grammar_failed_is_the_request_s_fault() -> None:
    problem = turn_failed("constraint: parser is too complex for 'secret'")
    assert (problem.status, problem.code) == (400, "constraint_failed")
    assert "secret" not in problem.message
    assert turn_failed("the executor failed: OSError").status == 500
