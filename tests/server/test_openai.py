"""The official client of OpenAI, unchanged, against a real server."""

from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from holdfast.server.routes.openai import CHAT_BODY, COMPLETION_BODY, CommonBody
from tests.server.openai_client import openai_client
from tests.server.serving import Server


@pytest.fixture
def client(echo: Server) -> Iterator[openai.OpenAI]:
    with openai_client(echo) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo",
        messages=[{"role": "system", "content": "x"}, {"role": "user", "content": "Hello!"}],
        max_completion_tokens=50,
        seed=7,
        temperature=0,
    )
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "grüße 🙂"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "grüße 🙂"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


def test_choices_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "ab"}], n=3, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == ["ab"] * 3
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [entry.token for entry in choice.logprobs.content][:2] == ["a", "b"]
    assert answer.usage is not None and answer.usage.completion_tokens == 9


def test_completions(client: openai.OpenAI, echo: Server) -> None:
    answer = client.completions.create(model="echo", prompt="abc", max_tokens=3, logprobs=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.text_offset == [0, 1, 2]
    several = client.completions.create(model="echo", prompt=["one", "two"], max_tokens=3, n=2)
    assert [choice.text for choice in several.choices] == ["one", "one", "two", "two"]
    tokens = echo.post("/tokenize", {"prompt": "xyz"}).json()["tokens"]
    streamed = client.completions.create(model="echo", prompt=tokens, max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == "xy"


def test_the_same_prompt_is_cached(client: openai.OpenAI) -> None:
    words = "a long prompt that fills several pages " * 8
    cached = []
    for _ in range(2):
        usage = client.completions.create(model="echo", prompt=words, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[1] is not None and cached[1] > 250


def test_stop_strings_and_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="abcdef", max_tokens=20, stop=["de"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")


def test_a_session_by_its_id_takes_only_what_is_new(client: openai.OpenAI, echo: Server) -> None:
    name = echo.open()
    known = 0
    for said in ("first", "second", "third"):
        answer = client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": said}], extra_body={"session_id": name}
        )
        assert answer.choices[0].message.content == said
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == known
        known = answer.usage.total_tokens


@pytest.mark.parametrize("field", ["functions", "audio", "lora_path", "chat_template"])
def test_what_is_not_built_is_refused_in_so_many_words(client: openai.OpenAI, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match="not supported yet") as caught:
        client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "x"}], extra_body={field: {"a": 1}}
        )
    assert caught.value.param == field


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="echo", prompt="x", max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="echo", messages=[])


def offsets(echo: Server, **fields: Any) -> tuple[str, list[str], list[int]]:
    """The text of a completion, its tokens and where they are, the same in one answer as in a stream."""
    body = {"logprobs": 0, "max_tokens": 60, **fields}
    [whole] = echo.post("/v1/completions", body).json()["choices"]
    said = echo.post("/v1/completions", {**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
    pieces = [msgspec.json.decode(line)["choices"][0] for line in lines if line != "[DONE]"]
    assert len(pieces) > 1
    for name in ("tokens", "text_offset"):
        streamed = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"][name]]
        assert streamed == whole["logprobs"][name], name
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    return whole["text"], whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"]


@pytest.mark.parametrize("prompt", ["plain", "héllo €uro 😀 end", "😀😀", "a\u0301\u2028\U0001d518"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ignore_eos": True},
        {"ignore_eos": True, "skip_special_tokens": False},
        {"stop": ["uro"]},
        {"stop": ["uro 😀 endless"]},
    ],
)
def test_offsets_count_characters_of_the_text(echo: Server, prompt: str, fields: dict[str, Any]) -> None:
    text, tokens, places = offsets(echo, prompt=prompt, **fields)
    said = text + "uro" if fields.get("stop") == ["uro"] and "uro" in prompt else text
    assert places[0] == 0 and places == sorted(places)
    for token, place in zip(tokens, places, strict=True):
        special = token.startswith("<|") and fields.get("skip_special_tokens", True)
        assert special or "\N{REPLACEMENT CHARACTER}" in token or said.startswith(token, place), (
            token,
            place,
        )
    letters = prompt.encode()
    count = min(len(letters), len(tokens))
    assert places[:count] == [len(letters[:size].decode(errors="ignore")) for size in range(count)]


def test_null_is_as_good_as_a_field_left_out(client: openai.OpenAI, echo: Server) -> None:
    """Clients write out what they were not given: every field that may be left out, and may be null."""
    written = client.completions.create(model="echo", prompt="abc", echo=None, stream=None)
    assert written.choices[0].text == "abc"
    bodies: dict[str, tuple[type[CommonBody], dict[str, Any]]] = {
        "/v1/completions": (COMPLETION_BODY.described, {"prompt": "abc"}),
        "/v1/chat/completions": (CHAT_BODY.described, {"messages": [{"role": "user", "content": "abc"}]}),
    }
    for path, (kind, given) in bodies.items():
        optional = [field.name for field in msgspec.structs.fields(kind) if field.name not in given]
        answer = echo.post(path, {**given, **dict.fromkeys(optional)})
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        assert choice.get("text", choice.get("message", {}).get("content")) == "abc"
        assert choice["finish_reason"] == "stop", "end tokens count, and are no text"
        streamed = echo.post(path, {**given, "stream": True, "stream_options": {"include_usage": None}})
        assert streamed.text.endswith("data: [DONE]\n\n") and '"usage"' not in streamed.text


def test_a_request_that_ends_early_harms_nobody(echo: Server) -> None:
    """Before it began, while it spoke, and because its client went away."""
    engine = echo.engine_pid()
    for timeout in (1e-6, 0.2):
        body = {"prompt": "la ", "max_tokens": 7000, "ignore_eos": True, "timeout": timeout}
        answer = echo.post("/v1/completions", body)
        assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "abort")
    with echo.http.stream(
        "POST", "/v1/completions", json={**body, "timeout": None, "stream": True}
    ) as stream:
        next(stream.iter_bytes())
    echo.settle()
    assert echo.engine_pid() == engine


def test_every_answer_has_an_id(echo: Server) -> None:
    assert echo.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert echo.get("/nothing").headers["x-request-id"].startswith("req-")
