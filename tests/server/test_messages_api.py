"""Anthropic's Messages over HTTP: blocks, tools, thinking, stop reasons, usage, streams, counting."""

from typing import Any

import pytest

from tests.server.anthropic_wire import (
    CALL,
    ROUND,
    WEATHER,
    body,
    collected,
    create,
    events_of,
    result,
    stream,
    text,
    total,
    user,
)
from tests.server.serving import Server

PAGE = 16
"""Tokens of a page: a prefix is cached in whole pages."""


def kinds(message: dict[str, Any]) -> list[str]:
    return [block["type"] for block in message["content"]]


def same_answer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two messages are the same but for their ids and what was cached."""

    def plain(message: dict[str, Any]) -> Any:
        blocks = [{name: block[name] for name in block if name != "id"} for block in message["content"]]
        usage = message["usage"]
        counts = (total(usage), usage["output_tokens"], usage["output_tokens_details"])
        return blocks, counts, {**message, "content": 0, "usage": 0, "id": 0}

    return bool(plain(one) == plain(other))


def test_a_message_has_the_form_of_anthropic(caller: Server) -> None:
    message = create(caller, user("hello"))
    assert message["id"].startswith("msg_")
    assert {name: message[name] for name in ("type", "role", "model", "content")} == {
        "type": "message",
        "role": "assistant",
        "model": "echo",
        "content": [text("hello")],
    }
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["output_tokens"] == 6
    assert create(caller, user("hello"))["id"] != message["id"]


def test_thinking_text_and_a_call_are_blocks_in_order(caller: Server) -> None:
    message = create(caller, user(ROUND), tools=[WEATHER])
    thinking, said, call = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.") and thinking["signature"]
    assert said == text("Let me see.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Bern", "days": 2})
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_a_stream_makes_the_same_message(caller: Server) -> None:
    for said in ("hello", ROUND, f"{CALL}\n{CALL}", f"<think>Hm.</think>{CALL}"):
        whole = create(caller, user(said), tools=[WEATHER])
        events = stream(caller, user(said), tools=[WEATHER])
        assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
        assert events[0]["message"]["stop_reason"] is None and events[0]["message"]["content"] == []
        started = events[0]["message"]["usage"]
        message = collected(events)
        assert same_answer(message, whole)
        assert total(started) == total(whole["usage"])
        assert events[-2]["type"] == "message_delta" and events[-2]["usage"]["output_tokens"] > 0


def test_two_rounds_of_tools(caller: Server) -> None:
    messages = [user(ROUND)]
    for answer_to_call in ("rain", [text("sun")]):
        message = create(caller, *messages, tools=[WEATHER])
        assert message["stop_reason"] == "tool_use"
        (call,) = [block for block in message["content"] if block["type"] == "tool_use"]
        messages.append({"role": "assistant", "content": message["content"]})
        messages.append(user([result(call["id"], answer_to_call), text(ROUND)]))
    last = create(caller, *messages[:-1], user([messages[-1]["content"][0], text("bye")]), tools=[WEATHER])
    assert last["content"] == [text("bye")]


def test_tool_choice(caller: Server) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        message = create(
            caller, user(CALL), tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True}
        )
        assert kinds(message) == ["tool_use"] and message["stop_reason"] == "tool_use"
        assert set(message["content"][0]["input"]) == {"city", "days"}
    message = create(caller, user(CALL), tools=[WEATHER], tool_choice={"type": "none"})
    assert kinds(message) == ["text"] and message["stop_reason"] == "end_turn"
    assert kinds(create(caller, user("hello"), tools=[WEATHER], tool_choice={"type": "auto"})) == ["text"]


def test_input_that_is_not_valid_json_reads_as_nothing(caller: Server) -> None:
    """A client that parses a stream as it comes must not meet half a value."""
    broken = CALL.replace('"days": 2', '"days": two')
    whole = create(caller, user(broken), tools=[WEATHER])
    events = stream(caller, user(broken), tools=[WEATHER])
    assert kinds(whole) == ["tool_use"] and whole["content"][0]["input"] == {}
    assert same_answer(collected(events), whole)
    cut = create(caller, user(CALL), tools=[WEATHER], max_tokens=60)
    assert (kinds(cut), cut["content"][0]["input"]) == (["tool_use"], {})
    assert cut["stop_reason"] == "max_tokens"


def test_an_eager_tool_streams_its_input_as_it_is_generated(caller: Server) -> None:
    def pieces(tool: dict[str, Any]) -> list[str]:
        events = stream(caller, user(CALL), tools=[tool])
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]

    assert len(pieces(WEATHER)) == 1
    eager = pieces({**WEATHER, "eager_input_streaming": True})
    assert len(eager) > 1 and "".join(eager) == pieces(WEATHER)[0]


@pytest.mark.parametrize(
    ("said", "fields", "reason", "stop"),
    [
        ("hello", {}, "end_turn", None),
        ("hello", {"max_tokens": 3}, "max_tokens", None),
        ("hello", {"stop_sequences": ["xx", "ll"]}, "stop_sequence", "ll"),
        ("<think>all</think>hello", {"stop_sequences": ["lo", "he"]}, "stop_sequence", "he"),
        ("hello", {"stop_sequences": ["zz"]}, "end_turn", None),
        ("hello", {"stop_sequences": []}, "end_turn", None),
    ],
)
def test_stop_reasons(
    caller: Server, said: str, fields: dict[str, Any], reason: str, stop: str | None
) -> None:
    for message in (create(caller, user(said), **fields), collected(stream(caller, user(said), **fields))):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


def test_an_answer_that_fills_the_context_says_so(caller: Server) -> None:
    """`max_tokens` may be more than fits: clients ask for their model's maximum."""
    said = "x" * 16_000
    message = create(caller, user(said), max_tokens=32_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert total(message["usage"]) + message["usage"]["output_tokens"] == 16_384


def test_thinking_can_be_switched_and_limited(caller: Server) -> None:
    said = user(f"<think>{'hm ' * 50}</think>yes")
    free = create(caller, said, thinking={"type": "adaptive"})
    few = create(caller, said, thinking={"type": "enabled", "budget_tokens": 20})
    thought = [message["usage"]["output_tokens_details"]["thinking_tokens"] for message in (free, few)]
    assert thought[0] > 100 and thought[1] < 40
    assert kinds(create(caller, user("no"), thinking={"type": "disabled"}, max_tokens=50)) == ["text"]


def test_thinking_that_is_not_shown_comes_back_with_its_signature(caller: Server) -> None:
    hidden = {"type": "adaptive", "display": "omitted"}
    shown = create(caller, user("<think>Hm.</think>yes"), thinking={"type": "adaptive"})
    whole = create(caller, user("<think>Hm.</think>yes"), thinking=hidden)
    assert (kinds(whole), whole["content"][0]["thinking"]) == (["thinking", "text"], "")
    assert same_answer(collected(stream(caller, user("<think>Hm.</think>yes"), thinking=hidden)), whole)
    counts = {
        count(caller, user("a"), {"role": "assistant", "content": message["content"]}, user("b"))
        for message in (shown, whole)
    }
    assert len(counts) == 1


def test_an_answer_goes_on_where_the_client_began_it(caller: Server) -> None:
    begun = {"role": "assistant", "content": "he"}
    whole, rest = create(caller, user("hello")), create(caller, user("hello"), begun)
    assert total(rest["usage"]) == total(whole["usage"]) + len("he")
    assert count(caller, user("hello"), begun) == total(rest["usage"])


def test_no_tokens_warm_the_cache_and_answer_nothing(caller: Server) -> None:
    said = user("hello " * 20)
    for message in (create(caller, said, max_tokens=0), collected(stream(caller, said, max_tokens=0))):
        assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
        assert message["usage"]["output_tokens"] == 0
    assert create(caller, said)["usage"]["cache_read_input_tokens"] >= count(caller, said) - PAGE


def test_structured_output(caller: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        message = create(caller, user('{"a": 1}'), thinking={"type": "disabled"}, **fields)
        assert [
            block["text"].replace(" ", "") for block in message["content"] if block["type"] == "text"
        ] == ['{"a":1}']


# --- what is computed -----------------------------------------------------------------------------


def count(server: Server, *messages: dict[str, Any], **fields: Any) -> int:
    answer = server.post("/v1/messages/count_tokens", {"messages": list(messages), **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"input_tokens"}
    return int(answer.json()["input_tokens"])


def test_counted_tokens_are_those_of_the_prompt(caller: Server) -> None:
    conversation: list[dict[str, Any]] = [user([text("a"), text("b")])]
    for fields in (
        {},
        {"system": "Be brief."},
        {"system": [text("Be brief.", cache_control={"type": "ephemeral", "ttl": "1h"})], "tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
    ):
        assert count(caller, *conversation, **fields) == total(
            create(caller, *conversation, **fields)["usage"]
        )


def test_examples_of_an_input_are_shown_with_its_schema(caller: Server) -> None:
    examples = [{"city": "Bern"}, {"city": "Rome"}]
    schema = {**WEATHER["input_schema"], "examples": examples}
    told = count(caller, user("a"), tools=[{**WEATHER, "input_examples": examples}])
    assert told == count(caller, user("a"), tools=[{**WEATHER, "input_schema": schema}])
    assert told > count(caller, user("a"), tools=[{**WEATHER, "input_examples": []}])


def test_cached_tokens_are_not_part_of_the_input(caller: Server) -> None:
    system, messages = "Be brief. " * 30, [user("one")]
    first = create(caller, *messages, system=system)
    assert first["usage"]["cache_read_input_tokens"] == 0
    messages += [{"role": "assistant", "content": first["content"]}, user("two")]
    second = create(caller, *messages, system=system)["usage"]
    before = total(first["usage"]) + first["usage"]["output_tokens"]
    assert second["cache_read_input_tokens"] >= before - PAGE
    assert second["input_tokens"] == total(second) - second["cache_read_input_tokens"]


def test_a_reminder_that_changes_at_the_end_costs_only_itself(caller: Server) -> None:
    """Claude Code adds a system reminder behind the user's text, and writes it anew in each turn."""

    def reminded(said: str, number: int, role: str) -> list[dict[str, Any]]:
        reminder = f"{number} files have changed."
        if role == "system":
            return [user(said), {"role": "system", "content": reminder}]
        return [user([text(said), text(f"<system-reminder>\n{reminder}\n</system-reminder>")])]

    system = [text("x-anthropic-billing-header: a;"), text("You are an agent. " * 20)]
    counts = []
    for role in ("system", "user"):
        history = [user("one " * 50), {"role": "assistant", "content": "done"}]
        kept = count(caller, *history, user("two"), system=system)
        create(caller, *history, *reminded("two", 1, role), system=system)
        system[0]["text"] += " b;"
        usage = create(caller, *history, *reminded("two", 2, role), system=system)["usage"]
        assert usage["cache_read_input_tokens"] >= kept - 2 * PAGE
        counts.append(total(usage))
    assert counts[0] == counts[1], "a system message behind the beginning is a reminder"


def test_cache_control_changes_nothing(caller: Server) -> None:
    control = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    plain = count(caller, user([text("a")]), system=[text("s")], tools=[WEATHER])
    marked = count(
        caller,
        user([text("a", **control)]),
        system=[text("s", **control)],
        tools=[{**WEATHER, **control}],
        **control,
    )
    assert plain == marked


def test_models_have_anthropics_form_for_its_clients(caller: Server) -> None:
    header = {"anthropic-version": "2023-06-01"}
    page = caller.get("/v1/models?limit=1000", headers=header).json()
    (model,) = page["data"]
    assert (model["type"], model["id"], page["has_more"], page["last_id"]) == ("model", "echo", False, "echo")
    assert model["max_input_tokens"] == 16_384
    assert caller.get("/v1/models/echo", headers=header).json() == model
    assert caller.get("/v1/models/opus", headers=header).status_code == 404
    assert caller.get("/v1/models").json()["object"] == "list"


# --- errors ---------------------------------------------------------------------------------------


def test_errors_have_anthropics_form_and_a_request_id(caller: Server) -> None:
    for path, sent, status, kind, code in (
        ("/v1/messages", body(user("x"), model="claude"), 404, "not_found_error", "model_not_found"),
        ("/v1/messages", body(user("x"), max_tokens=None), 400, "invalid_request_error", "invalid_value"),
        ("/v1/messages", body(user("x" * 17_000)), 400, "invalid_request_error", "context_length_exceeded"),
        ("/v1/messages/batches", {}, 404, "not_found_error", "not_found"),
        ("/v1/messages/count_tokens", {}, 400, "invalid_request_error", "invalid_value"),
    ):
        answer = caller.post(path, sent, headers={"x-request-id": "req-7"})
        assert answer.status_code == status, answer.text
        error = answer.json()
        assert (error["type"], error["request_id"]) == ("error", "req-7") and answer.headers[
            "request-id"
        ] == "req-7"
        assert (error["error"]["type"], error["error"]["code"]) == (kind, code)
        assert error["error"]["message"]
    assert caller.get("/v1/messages").status_code == 405


def test_a_prompt_over_the_context_is_told_in_the_words_that_clients_look_for(caller: Server) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        said = caller.post(path, body(user("xy " * 5_600))).json()["error"]["message"]
        assert said.startswith("prompt is too long: ") and said.endswith(" tokens > 16384 maximum")
        assert int(said.split()[4]) > 16_384
        long = caller.post(path, body(user("x" * 200_000))).json()["error"]["message"]
        assert long.startswith("prompt is too long: ") and "16384" in long


def test_a_thread_is_refused_so_that_tool_runners_go_on_without_it(caller: Server) -> None:
    error = caller.post("/v1/messages", body(user("x"), thread={"type": "create"})).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"} and error["param"] == "thread"


def test_a_failure_in_a_stream_is_its_last_event(caller: Server) -> None:
    with caller.http.stream("POST", "/v1/messages", json=body(user("y" * 3000), stream=True)) as answer:
        chunks = answer.iter_text()
        begun = next(chunks)
        caller.post("/abort_request", {"abort_all": True})
        events = events_of(begun + "".join(chunks))
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "overloaded_error"
    assert events[-1]["request_id"] == answer.headers["request-id"]
