"""OpenAI's conversations: items, metadata, and responses that continue them."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.openai_client import openai_client
from tests.server.serving import Server

LONG = {"max_output_tokens": 6000, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(responder: Server) -> Iterator[openai.OpenAI]:
    with openai_client(responder) as client:
        yield client


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def texts(client: openai.OpenAI, conversation: str) -> list[str]:
    listed = client.conversations.items.list(conversation, order="asc")
    return [item.content[0].text for item in listed]


def say(client: openai.OpenAI, said: Any, conversation: Any, **fields: Any) -> Any:
    return client.responses.create(model="echo", input=said, conversation=conversation, **fields)


def cached(response: Any) -> int:
    return int(response.usage.input_tokens_details.cached_tokens)


def test_responses_continue_a_conversation_in_place(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[user("before")], metadata={"topic": "tests"})
    assert made.metadata == {"topic": "tests"} and texts(client, made.id) == ["before"]
    first = say(client, "one", made.id)
    assert first.conversation.id == made.id and cached(first) == 0
    second = say(client, "two", {"id": made.id})
    assert cached(second) == first.usage.total_tokens
    assert texts(client, made.id) == ["before", "one", "one", "two", "two"]
    listed = list(client.conversations.items.list(made.id, limit=2))
    assert [item.content[0].text for item in listed] == ["two", "two", "one", "one", "before"]
    assert len({item.id for item in listed}) == 5
    found = client.conversations.items.retrieve(listed[0].id, conversation_id=made.id)
    assert found.to_dict() == listed[0].to_dict()


def test_added_items_are_said_with_the_next_response(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    first = say(client, "one", made.id)
    added = client.conversations.items.create(made.id, items=[user("added"), user("more")])
    assert len(added.data) == 2 and added.first_id == added.data[0].id
    second = say(client, "two", made.id)
    assert cached(second) == first.usage.total_tokens
    assert texts(client, made.id) == ["one", "one", "added", "more", "two", "two"]


def test_deleted_items_are_said_no_more(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[user("added")])
    client.conversations.items.delete(
        client.conversations.items.list(made.id).data[0].id, conversation_id=made.id
    )
    assert texts(client, made.id) == []
    say(client, "a secret", made.id)
    say(client, "two", made.id)
    for item in list(client.conversations.items.list(made.id, order="asc"))[:2]:
        client.conversations.items.delete(item.id, conversation_id=made.id)
    assert texts(client, made.id) == ["two", "two"]
    third = say(client, "three", made.id)
    alone = client.conversations.create()
    say(client, "two", alone.id)
    assert third.usage.input_tokens == say(client, "three", alone.id).usage.input_tokens
    assert texts(client, made.id) == ["two", "two", "three", "three"]
    fourth = say(client, "four", made.id)
    assert cached(fourth) == third.usage.total_tokens, "what was rendered anew goes on in place"


def test_one_response_at_a_time(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    running = say(client, "x" * 40, made.id, background=True, **LONG)
    with pytest.raises(openai.ConflictError) as caught:
        say(client, "two", made.id)
    assert caught.value.code == "conversation_locked"
    cancelled = client.responses.cancel(running.id)
    assert say(client, "two", made.id).output_text == "two"
    kept = [] if not cancelled.output_text else ["x" * 40, cancelled.output_text]
    assert texts(client, made.id) == [*kept, "two", "two"]


def test_a_response_that_is_not_stored_is_said_all_the_same(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    answer = say(client, "one", made.id, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    assert cached(say(client, "two", made.id)) == answer.usage.total_tokens
    assert texts(client, made.id) == ["one", "one", "two", "two"]


def test_metadata_and_deletion(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"a": "b"})
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(made.id).metadata == {"c": "d"}
    answer = say(client, "one", made.id)
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)
    assert client.responses.retrieve(answer.id).output_text == "one", "responses stay"


def test_log_probabilities_of_the_text(client: openai.OpenAI) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer: Any = client.responses.create(model="echo", input="abc", **asked)
    logprobs = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs).startswith("abc")
    assert [entry.logprob for entry in logprobs[:3]] == [0.0] * 3, "the model is certain"
    assert answer.top_logprobs == 2
    stream: Any = client.responses.create(model="echo", input="abc", stream=True, **asked)
    streamed = [entry for event in stream if event.type.endswith("text.delta") for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs][: len(streamed)]
    assert len(streamed) >= 3


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "", {"items": 7}, "items"),
        ("POST", "", {"items": [{"type": "x"}]}, "items[0].type"),
        ("POST", "", {"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        ("POST", "", {"metadata": {"a": 1}}, "metadata"),
        ("POST", "", {"metadata": []}, "metadata"),
        ("POST", "/{}", {}, "metadata"),
        ("POST", "/{}", {"metadata": {"a" * 65: "x"}}, "metadata"),
        ("POST", "/{}/items", {}, "items"),
        ("POST", "/{}/items", {"items": []}, "items"),
        ("POST", "/{}/items", {"items": [{"role": "user", "content": 7}]}, "items[0].content"),
        ("GET", "/{}/items?limit=x", None, "limit"),
        ("GET", "/{}/items?after=x", None, "after"),
        ("GET", "/{}/items/none", None, "item_id"),
        ("DELETE", "/{}/items/none", None, "item_id"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests_are_refused_by_name(
    responder: Server, client: openai.OpenAI, method: str, path: str, body: Any, param: str
) -> None:
    made = client.conversations.create()
    answer = responder.http.request(method, "/v1/conversations" + path.format(made.id), json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param
    assert texts(client, made.id) == []


@pytest.mark.parametrize("name", ["x", "conv_c" + "0" * 16, "~c", "conv_" + "x" * 5000])
def test_ids_of_no_conversation(responder: Server, name: str) -> None:
    for method, path, body in (
        ("GET", "", None),
        ("POST", "", {"metadata": {}}),
        ("DELETE", "", None),
        ("GET", "/items", None),
        ("POST", "/items", {"items": [user("x")]}),
        ("GET", "/items/x", None),
        ("DELETE", "/items/x", None),
    ):
        answer = responder.http.request(method, f"/v1/conversations/{name}{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "conversation_not_found")
