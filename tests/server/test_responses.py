"""OpenAI's client, unchanged, on responses: continued in place, forked, rendered anew, and over a restart.

The model repeats the user's last message, so a test says the very call or thought that it wants to see.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.agents import BERN, SING, TOOLS, WEATHER, calling
from tests.server.bad_values import JSON
from tests.server.openai_client import openai_client
from tests.server.serving import Server
from tests.server.test_bad_input import BODIES

ARGUMENTS = (
    *("--tool-parser", "hermes", "--reasoning-parser", "think", "--audit", "strict"),
    *("--kv-tokens", "65536", "--context-length", "8192", "--tenant-sessions", "12"),
)
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
BRIEF: Any = {"temperature": 1, "max_output_tokens": 300, "extra_body": {"thinking_tokens": 0, "seed": 3}}
LONG = {"max_output_tokens": 6000, "extra_body": {"ignore_eos": True}}


class Restartable:
    """A server with a journal that a test may restart."""

    def __init__(self, journal: Path) -> None:
        self._arguments = (*ARGUMENTS, "--journal", str(journal))
        self.server = Server("echo", *self._arguments)

    def restart(self) -> None:
        assert self.server.stop() == 0
        self.server = Server("echo", *self._arguments)


@pytest.fixture(scope="module")
def restartable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    made = Restartable(tmp_path_factory.mktemp("responses") / "journal")
    yield made
    assert made.server.stop() == 0
    assert made.server.complaints() == []


@pytest.fixture
def server(restartable: Restartable) -> Server:
    return restartable.server


def client_of(server: Server) -> openai.OpenAI:
    return openai_client(server)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def say(client: openai.OpenAI, said: Any, **fields: Any) -> Any:
    return client.responses.create(model="echo", input=said, **fields)


def figures(response: Any) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were in memory."""
    return response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# --- going on -------------------------------------------------------------------------------------


def test_a_response_is_continued_in_place_and_forked(client: openai.OpenAI) -> None:
    first = say(client, "one")
    assert (first.output_text, first.status, first.object) == ("one", "completed", "response")
    second = say(client, "two", previous_response_id=first.id)
    assert figures(second)[1] == first.usage.total_tokens, "all of the conversation is in memory"
    assert second.previous_response_id == first.id
    fork = say(client, "a fork", previous_response_id=first.id)
    assert fork.output_text == "a fork"
    assert figures(fork)[1] == first.usage.total_tokens
    third = say(client, "three", previous_response_id=second.id)
    assert figures(third)[1] == second.usage.total_tokens, "the fork has changed nothing"


def test_instructions_are_of_one_response(client: openai.OpenAI) -> None:
    first = say(client, "one", instructions="Be terse.")
    same = say(client, "two", instructions="Be terse.", previous_response_id=first.id)
    assert figures(same)[1] == first.usage.total_tokens
    without = say(client, "three", previous_response_id=same.id)
    other = say(client, "three", instructions="Be at length.", previous_response_id=same.id)
    assert without.instructions is None and other.instructions == "Be at length."
    assert figures(without)[0] < figures(other)[0]
    assert figures(without)[1] < same.usage.total_tokens, "the conversation was rendered anew"
    # What was rendered anew goes on in place, with all of the conversation.
    after = say(client, "four", previous_response_id=without.id)
    assert figures(after)[1] == without.usage.total_tokens


def test_a_response_that_is_not_stored_continues_one_that_is(client: openai.OpenAI) -> None:
    first = say(client, "one")
    unstored = say(client, "two", previous_response_id=first.id, store=False)
    stored = say(client, "two", previous_response_id=first.id)
    assert unstored.output_text == "two" and figures(unstored)[0] == figures(stored)[0]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_two_responses_at_once_continue_the_same_one(client: openai.OpenAI) -> None:
    first = say(client, "one")
    running = say(client, "x" * 40, previous_response_id=first.id, background=True, **LONG)
    beside = say(client, "beside", previous_response_id=first.id)
    assert beside.output_text == "beside"
    client.responses.cancel(running.id)
    after = say(client, "after", previous_response_id=first.id)
    assert figures(after)[0] == figures(beside)[0] - 1, "the same conversation, with one letter less"


def test_references_mean_items_of_stored_responses(client: openai.OpenAI) -> None:
    first = say(client, "one")
    said = [
        {"role": "user", "content": "one"},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "two"},
    ]
    whole = say(client, said)
    assert figures(whole)[0] == figures(say(client, "two", previous_response_id=first.id))[0]
    with pytest.raises(openai.NotFoundError) as caught:
        say(client, [{"type": "item_reference", "id": "msg_none"}])
    assert caught.value.param == "input[0].id"


def test_references_to_the_items_of_a_stream(client: openai.OpenAI) -> None:
    """Text after a call is a message of its own in a stream, and part of the first one in what is kept."""
    text = f"before {calling('weather', BERN)} after"
    with client.responses.stream(model="echo", input=text, tools=FLAT, **BRIEF) as stream:
        streamed = stream.get_final_response()
    assert [item.type for item in streamed.output] == ["message", "function_call", "message"]
    call = next(item for item in streamed.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    references = [{"type": "item_reference", "id": item.id} for item in streamed.output]
    whole = say(client, [{"role": "user", "content": text}, *references, result], tools=FLAT)
    kept = client.responses.retrieve(streamed.id).output
    resent = [{"type": "item_reference", "id": item.id} for item in kept]
    same = say(client, [{"role": "user", "content": text}, *resent, result], tools=FLAT)
    assert whole.output_text == same.output_text and "rain" in whole.output_text
    assert figures(whole)[0] == figures(same)[0], "each text is there once"
    alone = say(client, [references[2], {"role": "user", "content": "on"}])
    assert alone.output_text == "on", "a reference to a later part alone means the whole message"


# --- items ----------------------------------------------------------------------------------------


def test_a_tools_loop_with_two_rounds(client: openai.OpenAI) -> None:
    answer = say(client, calling("weather", BERN), tools=FLAT)
    seen = []
    for result in (calling("sing", {"loud": True}), "Bern has rain."):
        call = answer.output[-1]
        assert (call.type, call.status) == ("function_call", "completed")
        seen.append((call.name, json.loads(call.arguments)))
        output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
        before = answer.usage.total_tokens
        answer = say(client, [output], tools=FLAT, previous_response_id=answer.id)
        assert figures(answer)[1] == before, "the loop goes on in place"
    assert seen == [("weather", BERN), ("sing", {"loud": True})]
    assert "Bern has rain." in answer.output_text


def test_a_loop_whose_client_keeps_the_items(client: openai.OpenAI) -> None:
    """As agents do that store nothing: every request has all items, with the model's own."""
    items: list[Any] = [{"role": "user", "content": f"<think>hm</think>{calling('weather', BERN)}"}]
    asked = {"store": False, "include": ["reasoning.encrypted_content"], "tools": FLAT}
    answer = say(client, items, **asked)
    reasoning, call = answer.output
    assert [part.text for part in reasoning.content] == ["hm"] and reasoning.summary == []
    assert reasoning.encrypted_content and answer.usage.output_tokens_details.reasoning_tokens > 0
    items += [item.model_dump(exclude_none=True) for item in answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    answer = say(client, items, **asked)
    assert "rain" in answer.output_text
    items[1].pop("content")  # Some clients carry only what is encrypted.
    assert figures(say(client, items, **asked))[0] == figures(answer)[0]


def test_requests_of_codex_are_answered(server: Server) -> None:
    """Two requests of codex-cli 0.169.0, as it sent them, with shorter texts and fewer tools.

    The first one makes the model call a tool, the second brings the result.
    """
    first, second = json.loads((Path(__file__).parent / "codex_requests.json").read_text())
    kinds = []
    for request in (first, second):
        answer = server.post("/v1/responses", request)
        assert answer.status_code == 200, answer.text
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1]["type"] == "response.completed"
        assert [tool["type"] for tool in events[0]["response"]["tools"]] == [
            "function",
            "function",
            "namespace",
        ]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        kinds.append([item["type"] for item in done])
    assert kinds == [["reasoning", "function_call"], ["message"]]
    for choice in ("required", {"type": "web_search"}):
        answer = server.post("/v1/responses", {**first, "tool_choice": choice})
        assert answer.status_code == 400, "a search that may be required is refused"


def test_other_tools_of_the_client_are_called_as_functions(client: openai.OpenAI) -> None:
    tools: Any = [
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
        },
        {"type": "local_shell"},
        {"type": "namespace", "name": "files", "description": "", "tools": [FLAT[1]]},
    ]
    text = calling("patch", {"input": "a\nb"}) + calling("local_shell", {"command": ["ls", "-l"]})
    answer = say(client, text + calling("files.sing", {"loud": True}), tools=tools)
    patch, shell, sing = answer.output
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "a\nb")
    assert (shell.type, shell.action.command) == ("local_shell_call", ["ls", "-l"])
    assert (sing.type, sing.name, sing.namespace) == ("function_call", "sing", "files")
    results = [
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "patched"},
        {"type": "local_shell_call_output", "id": shell.call_id, "output": "a file"},
        {"type": "function_call_output", "call_id": sing.call_id, "output": "la"},
    ]
    after = say(client, results, tools=tools, previous_response_id=answer.id)
    assert figures(after)[1] == answer.usage.total_tokens
    with client.responses.stream(model="echo", input=calling("patch", {"input": "c"}), tools=tools) as stream:
        pieces = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
    assert pieces == ["c"]


def test_custom_tools_of_a_namespace_keep_it(client: openai.OpenAI) -> None:
    tools: Any = [
        {
            "type": "namespace",
            "name": "files",
            "description": "",
            "tools": [{"type": "custom", "name": "patch"}],
        }
    ]
    said = calling("files.patch", {"input": "a"})
    answer = say(client, said, tools=tools)
    (patch,) = answer.output
    assert (patch.type, patch.name, patch.namespace) == ("custom_tool_call", "patch", "files")
    result = {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"}
    after = say(client, [result], tools=tools, previous_response_id=answer.id)
    # A client that keeps the items says the same: the call has its whole name.
    items = [{"role": "user", "content": said}, patch.model_dump(exclude_none=True), result]
    again = say(client, items, tools=tools, store=False)
    assert after.usage.input_tokens == again.usage.input_tokens


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "sing"}, {"sing"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sing"}]},
            {"sing"},
        ),
        ("required", {"sing", "weather"}),
        ("none", set()),
    ],
    ids=["a function", "allowed", "required", "none"],
)
def test_choices_of_tools(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    answer = say(client, "x", tools=FLAT, tool_choice=choice, parallel_tool_calls=False, **BRIEF)
    called = {item.name for item in answer.output if item.type == "function_call"}
    assert called <= names and bool(called) == bool(names)


def test_a_format_is_obeyed(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    named = {"type": "json_schema", "name": "x", "strict": True, "schema": schema}
    answer = say(client, "x", text={"format": named}, **BRIEF)
    assert json.loads(answer.output_text) == {"a": 1} and answer.text.format.type == "json_schema"


def test_log_probabilities_of_the_text(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        say(client, "abc", include=["message.output_text.logprobs"], top_logprobs=2)
    assert caught.value.param == "include", "the model of these tests reasons"


@pytest.mark.parametrize("store", [True, False])
def test_a_problem_names_the_item_beside_instructions(client: openai.OpenAI, store: bool) -> None:
    said = [{"role": "user", "content": "x"}, {"type": "function_call_output", "call_id": "c", "output": "y"}]
    with pytest.raises(openai.BadRequestError) as caught:
        say(client, said, instructions="Be terse.", store=store)
    assert (caught.value.param or "").startswith("input[1]"), caught.value.message


def test_a_limit_makes_a_response_incomplete(client: openai.OpenAI) -> None:
    answer = say(client, "a long answer", max_output_tokens=3, metadata={"a": "b"})
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete" and answer.usage.output_tokens == 3
    assert answer.metadata == {"a": "b"} and answer.max_output_tokens == 3
    again = client.responses.retrieve(answer.id)
    assert again.to_dict() == answer.to_dict()


def test_items_are_dropped_where_the_context_is_full(client: openai.OpenAI) -> None:
    items = [{"role": "user", "content": f"{number} " + "x" * 900} for number in range(12)]
    with pytest.raises(openai.BadRequestError) as caught:
        say(client, items)
    assert caught.value.code == "context_length_exceeded"
    for store in (True, False):
        answer = say(client, items, truncation="auto", store=store, max_output_tokens=4)
        assert answer.output_text.startswith("11 ") and figures(answer)[0] < 8192
    full = say(client, items[:8], max_output_tokens=4)
    asked = {"truncation": "auto", "max_output_tokens": 1100}
    after = say(client, "yes", previous_response_id=full.id, **asked)
    assert after.output_text == "yes" and figures(after)[0] < full.usage.total_tokens
    assert figures(say(client, "z", previous_response_id=after.id))[1] == after.usage.total_tokens


# --- streams --------------------------------------------------------------------------------------


def test_the_events_of_a_stream_are_in_order(client: openai.OpenAI) -> None:
    said = f"<think>hm</think>Well.{calling('weather', BERN)}"
    events = list(client.responses.create(model="echo", input=said, tools=FLAT, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    runs = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    item = ["output_item.added", "content_part.added"]
    assert runs == [
        *("created", "in_progress"),
        *(*item, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *(*item, "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    last = events[-1].response
    assert [each.type for each in last.output] == ["reasoning", "message", "function_call"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [each.id for each in last.output]
    stored = client.responses.retrieve(last.id)
    assert stored.to_dict() == last.to_dict(), "what was streamed is what is kept"


def test_a_stream_that_its_client_leaves_is_taken_back(server: Server, client: openai.OpenAI) -> None:
    first = say(client, "one")
    stream = client.responses.create(
        model="echo", input="x" * 40, previous_response_id=first.id, stream=True, **LONG
    )
    gone = next(iter(stream)).response.id
    stream.close()

    def is_free() -> bool:
        return client.responses.retrieve(gone).status == "cancelled"

    wait_until(is_free)
    after = say(client, "two", previous_response_id=first.id)
    assert figures(after)[1] == first.usage.total_tokens, "the turn has left nothing behind"


# --- background -----------------------------------------------------------------------------------


def test_a_background_response_is_cancelled_and_keeps_its_text(client: openai.OpenAI) -> None:
    running = say(client, "x" * 40, background=True, **LONG)
    assert running.status in ("queued", "in_progress") and running.background
    wait_until(lambda: client.responses.retrieve(running.id).status == "in_progress")
    cancelled = client.responses.cancel(running.id)
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(running.id).id == running.id
    kept = client.responses.retrieve(running.id)
    assert kept.output_text == cancelled.output_text and "x" in kept.output_text + "x"
    after = say(client, "go on", previous_response_id=running.id)
    assert figures(after)[1] == cancelled.usage.total_tokens


def test_a_background_stream_is_taken_up_again(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="echo", input="some words", background=True, stream=True)
    first = next(iter(stream))
    stream.close()
    rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=1))
    assert [event.sequence_number for event in rest] == list(range(2, 2 + len(rest)))
    assert rest[-1].type == "response.completed" and rest[-1].response.output_text == "some words"


def test_the_events_of_a_response_that_is_over(client: openai.OpenAI) -> None:
    answer = say(client, f"Well.{calling('weather', BERN)}", tools=FLAT)
    events = list(client.responses.retrieve(answer.id, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].response.to_dict() == answer.to_dict()
    (last,) = client.responses.retrieve(answer.id, stream=True, starting_after=7)
    assert (last.type, last.sequence_number) == ("response.completed", 8)


# --- what is kept ---------------------------------------------------------------------------------


def test_input_items_are_listed_by_page(client: openai.OpenAI) -> None:
    said = [{"role": "user", "content": str(number)} for number in range(5)]
    answer = say(client, said)
    listed = client.responses.input_items.list(answer.id, limit=2, order="asc")
    texts = [item.content[0].text for item in listed]
    assert texts == ["0", "1", "2", "3", "4"] and len(listed.data) == 2
    newest = client.responses.input_items.list(answer.id)
    assert [item.content[0].text for item in newest] == texts[::-1]


def test_a_deleted_response_is_gone_and_its_successor_is_not(client: openai.OpenAI) -> None:
    first = say(client, "one")
    second = say(client, "two", previous_response_id=first.id)
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        say(client, "three", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    assert say(client, "three", previous_response_id=second.id).output_text == "three"


def test_the_least_recently_used_session_makes_room(server: Server, client: openai.OpenAI) -> None:
    """Both can be continued: one in its session, the other is rendered anew and computed again."""
    used, unused = say(client, "abcdefgh" * 8), say(client, "stuvwxyz" * 8)
    for number in range(11):
        client.responses.retrieve(used.id)
        say(client, str(number))
    assert server.post("/flush_cache", {}).status_code == 200  # The prefix tree has both.
    cached: list[int] = []
    for answer in (used, unused):
        assert client.responses.retrieve(answer.id).output_text == answer.output_text
        usage = say(client, "on", previous_response_id=answer.id).usage
        assert usage is not None and usage.input_tokens > 128
        cached.append(usage.input_tokens_details.cached_tokens)
    assert cached[0] > 128 > cached[1]


def test_hidden_sessions_are_not_shown(server: Server, client: openai.OpenAI) -> None:
    answer = say(client, "one")
    assert server.get("/v1/sessions").json()["sessions"] == []
    name = "~" + answer.id.removeprefix("resp_")[:17]
    assert server.get(f"/v1/sessions/{name}").status_code == 400
    assert server.post("/v1/chat/completions", {"messages": [], "session_id": name}).status_code == 400


def test_everything_is_there_after_a_restart(restartable: Restartable) -> None:
    with client_of(restartable.server) as client:
        first = say(client, f"<think>hm</think>{calling('weather', BERN)}", tools=FLAT, metadata={"a": "b"})
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
        second = say(client, [result], tools=FLAT, previous_response_id=first.id)
        gone = say(client, "gone", previous_response_id=second.id, tools=FLAT)
        client.responses.delete(gone.id)
        conversation = client.conversations.create(metadata={"c": "d"})
        spoken = say(client, "in a conversation", conversation=conversation.id)
        client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "later"}])
        items = [item.to_dict() for item in client.conversations.items.list(conversation.id)]
    restartable.restart()
    with client_of(restartable.server) as client:
        assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
        assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)
        (listed,) = client.responses.input_items.list(second.id)
        assert (listed.type, listed.output) == ("function_call_output", "rain")
        third = say(client, "three", tools=FLAT, previous_response_id=second.id)
        assert figures(third)[0] > second.usage.total_tokens
        fork = say(client, "three", tools=[FLAT[0]], previous_response_id=second.id)
        assert fork.output_text == "three"
        assert client.conversations.retrieve(conversation.id).to_dict() == conversation.to_dict()
        assert [item.to_dict() for item in client.conversations.items.list(conversation.id)] == items
        answer = say(client, "on", conversation=conversation.id)
        assert figures(answer)[0] > spoken.usage.total_tokens


# --- bad input ------------------------------------------------------------------------------------

TEXT = {"type": "input_text", "text": "x"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [7]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 7}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, None),
        ({"input": [{"type": "local_shell_call", "call_id": "c", "action": {}}]}, "input[0].action"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "id": 7}]}, "input[0].id"),
        ({"input": "\ud800"}, None),
        ({"model": "another"}, "model"),
        ({"instructions": 7}, "instructions"),
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"previous_response_id": "resp_r" + "0" * 32}, "previous_response_id"),
        ({"previous_response_id": "x", "conversation": "conv_c" + "0" * 16}, "previous_response_id"),
        ({"conversation": "conv_x"}, "conversation"),
        ({"conversation": {"id": "conv_c" + "0" * 16}}, "conversation_id"),
        ({"conversation": {"id": 7}}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"include": ["everything"]}, "include[0]"),
        ({"include": "reasoning.encrypted_content"}, "include"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"reasoning": {"effort": []}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 7}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [7]}]}, "tools[0].tools[0]"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "name": "none"}}, "tool_choice.name"),
        ({"tools": FLAT, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": FLAT, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        (
            {"tools": FLAT, "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
            "tool_choice.mode",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"truncation": "middle"}, "truncation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_output_tokens": 9000}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"n": 2}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"input": [{"role": "user", "content": "x" * 9000}]}, "input"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("store", [True, False])
def test_bad_bodies_are_refused_by_name(server: Server, body: Any, param: str | None, store: bool) -> None:
    full = {"input": "x", "store": store, **body} if body else {"store": store}
    answer = server.http.post(
        "/v1/responses", content=json.dumps(full), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    if param is not None:
        assert error["param"] == param, answer.text
    assert "previous" not in (param or "") or error["code"]


@pytest.mark.parametrize("case", BODIES)
def test_bodies_that_are_not_json(server: Server, case: str) -> None:
    for path in ("/v1/responses", "/v1/conversations"):
        answer = server.http.post(path, content=BODIES[case], headers=JSON)
        # Unknown fields are ignored, and a conversation needs none: some of these bodies ask for nothing bad.
        unread = path == "/v1/conversations" or case == "huge exponent"
        assert answer.status_code == 400 or (unread and answer.status_code == 200), answer.text


@pytest.mark.parametrize(
    "name", ["x", "resp_x", "resp_r" + "0" * 32, "%00", "resp_" + "x" * 5000, "~r", "%2e%2e"]
)
def test_ids_of_no_response(server: Server, name: str) -> None:
    for method, path in (
        ("GET", f"/v1/responses/{name}"),
        ("GET", f"/v1/responses/{name}?stream=true&starting_after=3"),
        ("GET", f"/v1/responses/{name}/input_items"),
        ("POST", f"/v1/responses/{name}/cancel"),
        ("DELETE", f"/v1/responses/{name}"),
    ):
        assert server.http.request(method, path).status_code in (400, 404, 405), path


def test_bad_queries_are_refused_by_name(client: openai.OpenAI, server: Server) -> None:
    path = f"/v1/responses/{say(client, 'x').id}"
    for query, param in (
        ("?stream=perhaps", "stream"),
        ("?starting_after=-1", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=1000", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=none", "after"),
    ):
        answer = server.get(path + query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_tools_are_those_of_the_other_dialects() -> None:
    assert [tool["name"] for tool in FLAT] == [WEATHER["function"]["name"], SING["function"]["name"]]
