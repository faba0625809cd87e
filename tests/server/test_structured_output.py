"""What grammars make of a model that knows nothing: required calls, structured output, thinking budgets."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from holdfast.client import Client
from tests.models.small import END, write_small_model
from tests.server.agents import TOOLS, assert_valid, called, user
from tests.server.openai_client import openai_client
from tests.server.serving import Server

Body = dict[str, Any]

SPEAKER_TEMPLATE = (
    "{% if tools %}<|start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>"
    '<tool_call>{"name": <name>, "arguments": <object>}</tool_call><|end|>\n{% endif %}'
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def shared_speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = write_small_model(tmp_path_factory.mktemp("speaker") / "llama", ends=True)
    described = json.loads((directory / "tokenizer_config.json").read_text())
    described["chat_template"] = SPEAKER_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    server = Server(directory, "--audit", "strict", "--kv-tokens", "16384", "--seed", "5")
    yield server
    assert server.stop() == 0
    assert server.complaints() == []


@pytest.fixture
def speaker(shared_speaker: Server) -> Iterator[Callable[..., Any]]:
    """Chat completions of a small model that reasons and calls tools as its template says; it does not think
    unless it is asked to."""
    with openai_client(shared_speaker) as client:
        model = client.models.list().data[0].id

        def create(**fields: Any) -> Any:
            extra = {"thinking": False, **fields.pop("extra_body", {})}
            defaults: Body = {"model": model, "messages": [user("bak del fin")], "max_tokens": 400}
            method = getattr(client.chat.completions, fields.pop("method", "create"))
            return method(**{**defaults, **fields}, extra_body=extra)

        yield create
    shared_speaker.check_clean()


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_call_is_required(speaker: Callable[..., Any], temperature: int) -> None:
    answer = speaker(tools=TOOLS, tool_choice="required", temperature=temperature).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    for name, arguments in called(answer.message):
        assert_valid(name, arguments)


def test_a_named_tool_is_called(speaker: Callable[..., Any]) -> None:
    choice = {"type": "function", "function": {"name": "sing"}}
    for stream in (False, True):
        if stream:
            chunks = list(speaker(tools=TOOLS, tool_choice=choice, temperature=1, stream=True))
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert calls[0].function.name == "sing"
            arguments = json.loads("".join(call.function.arguments or "" for call in calls))
        else:
            message = speaker(tools=TOOLS, tool_choice=choice, temperature=1).choices[0].message
            ((name, arguments),) = called(message)
            assert name == "sing"
        assert_valid("sing", arguments)


class Trip(BaseModel):
    """What an answer is parsed into."""

    city: Literal["Bern", "Oslo"]
    days: int = Field(ge=1, le=7)
    cheap: bool


SCHEMA = {**Trip.model_json_schema(), "additionalProperties": False}


def test_structured_output_is_parsed(speaker: Callable[..., Any]) -> None:
    for seed in range(3):
        answer = speaker(method="parse", response_format=Trip, temperature=1, seed=seed).choices[0]
        assert answer.finish_reason == "stop"
        assert isinstance(answer.message.parsed, Trip)


def test_structured_output_as_json(speaker: Callable[..., Any]) -> None:
    schema = {
        "name": "trip",
        "strict": True,
        "schema": SCHEMA,
    }
    form = {"type": "json_schema", "json_schema": schema}
    answer = speaker(response_format=form, temperature=1).choices[0]
    assert Trip.model_validate_json(answer.message.content)
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in speaker(response_format=form, temperature=1, stream=True)
    )
    assert Trip.model_validate_json(text)
    several = speaker(response_format=form, temperature=1, n=3)
    assert all(Trip.model_validate_json(choice.message.content) for choice in several.choices)


def test_a_thinking_budget(speaker: Callable[..., Any]) -> None:
    answer = speaker(max_tokens=40, extra_body={"thinking": True, "thinking_tokens": 6, "ignore_eos": True})
    message = answer.choices[0].message
    assert message.reasoning and message.content and "think>" not in message.content + message.reasoning
    assert message.reasoning_content == message.reasoning
    details = answer.usage.completion_tokens_details
    assert 6 <= details.reasoning_tokens <= 20 and answer.usage.completion_tokens == 40


def test_structured_output_after_reasoning(speaker: Callable[..., Any]) -> None:
    answer = speaker(
        method="parse",
        response_format=Trip,
        temperature=1,
        extra_body={"thinking": True, "thinking_tokens": 5},
    ).choices[0]
    assert isinstance(answer.message.parsed, Trip)


def test_generate_and_completions(shared_speaker: Server) -> None:
    sampling = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 400, "temperature": 1.0}
    answer = shared_speaker.post("/generate", {"text": "bak del", "sampling_params": sampling}).json()
    assert Trip.model_validate_json(answer["text"])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    body = {"prompt": ["bak", "del"], "max_tokens": 400, "temperature": 1, "response_format": form}
    several = shared_speaker.post("/v1/completions", body).json()["choices"]
    assert all(Trip.model_validate_json(choice["text"]) for choice in several)
    regex = {**sampling, "regex": "(yes|no)!"}
    del regex["json_schema"]
    answer = shared_speaker.post("/generate", {"text": "bak del", "sampling_params": regex}).json()
    assert answer["text"] in ("yes!", "no!")


def test_sessions_and_the_client_library(shared_speaker: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    with Client(shared_speaker.url) as client, client.session(tools=TOOLS) as session:
        told = session.say("bak", max_tokens=400, thinking=False, response_format=form, tool_choice="none")
        assert Trip.model_validate_json(told.text) and told.tool_calls == ()
        turn = session.say("del", max_tokens=400, thinking=False, tool_choice="required", temperature=1.0)
        assert turn.finish_reason == "tool_calls"
        for call in turn.tool_calls:
            assert_valid(call.name, call.parsed())
        results = {call.id: "gor" for call in turn.tool_calls}
        last = session.tool_results(results, max_tokens=30, thinking=True, thinking_tokens=4)
        assert last.reasoning and last.usage.reasoning_tokens >= 4
    shared_speaker.check_clean()
