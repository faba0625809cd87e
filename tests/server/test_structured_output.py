"""What grammars make of a model that knows nothing: required calls, structured output, thinking budgets."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.models.small import write_small_model
from tests.server.agents import TOOLS, assert_valid, called, user
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
    with openai.OpenAI(base_url=f"{shared_speaker.url}/v1", api_key="none", max_retries=0) as client:
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


def test_structured_output_is_parsed(speaker: Callable[..., Any]) -> None:
    for seed in range(3):
        answer = speaker(method="parse", response_format=Trip, temperature=1, seed=seed).choices[0]
        assert answer.finish_reason == "stop"
        assert isinstance(answer.message.parsed, Trip)


def test_structured_output_as_json(speaker: Callable[..., Any]) -> None:
    schema = {
        "name": "trip",
        "strict": True,
        "schema": {**Trip.model_json_schema(), "additionalProperties": False},
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
