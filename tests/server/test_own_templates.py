"""Checkpoints that describe their own answers: prompts, answers, continuations and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast import Engine, Sampling
from holdfast.engine.options import OptionError
from holdfast.engine.text.answer_reader import AnswerReader, UnknownFormat
from holdfast.engine.tools.answer import AnswerSpec
from holdfast.server.link import wire
from holdfast.server.text import jobs
from holdfast.server.text.process import TextWorker, tokenizer_of
from tests.models.small import write_small_model
from tests.tools.templates import HERMES
from tests.tools.tokens import END, byte_tokenizer

TEMPLATE = """\
{%- if tools %}[tools]{{ tools | tojson }}[/tools]{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<do>{{ {"fn": call.function.name, "with": \
call.function.arguments} | tojson }}</do>{% endfor %}<|end_of_turn|>{% endfor %}
{%- if add_generation_prompt %}<assistant><muse>{% endif %}"""

OWN = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<muse>", "close": "</muse>"},
        "tool_calls": {
            "open": "<do>",
            "close": "</do>",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{content.fn}", "arguments": "{content.with}"}},
        },
        "content": {"close": "<|end_of_turn|>"},
    },
}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
SAID = [{"role": "user", "content": "hi"}]
ANSWER = 'Hm.</muse>Let me see. <do>{"fn": "look", "with": {"where": "up"}}</do><|end_of_turn|>'


def vocabulary(template: str = TEMPLATE, own: Any = OWN) -> wire.Vocabulary:
    encoder = byte_tokenizer(())
    return wire.Vocabulary(encoder.to_str(), template, {"eos_token": END}, [encoder.token_to_id(END)], own)


def worker() -> TextWorker:
    return TextWorker(jobs.Setup(vocabulary(), 1 << 14, 1 << 30, 10.0, 60.0, calls="response-template"))


def written(job: jobs.Chat) -> jobs.Written:
    answer = worker().answer(job)
    assert isinstance(answer, jobs.Written), answer
    return answer


def test_an_answer_is_read_as_its_checkpoint_describes() -> None:
    made = written(jobs.Chat(SAID, None, first=True, asks=jobs.Asks(tools=[LOOK])))
    tokenizer = tokenizer_of(vocabulary())
    text = tokenizer.decode(made.tokens, skip_special_tokens=False)
    assert text.startswith("[tools][{") and text.endswith("<assistant><muse>")
    assert made.grammar is None and made.answer is not None
    assert made.answer.calls == "response-template"
    assert text.endswith(made.answer.prompt_end) and "<assistant><muse>" in made.answer.prompt_end
    assert made.answer.reasoning is None


@pytest.mark.parametrize("asks", [jobs.Asks(tools=[LOOK], thinking_tokens=9), jobs.Asks(thinking_tokens=9)])
def test_its_reasoning_is_read_with_and_without_tools(asks: jobs.Asks) -> None:
    made = written(jobs.Chat(SAID, None, first=True, asks=asks))
    assert made.answer is not None and made.answer.thinking_tokens == 9
    offered = {"look": {"where": ["string"]}}
    spec = AnswerSpec(calls=made.answer.calls, prompt_end=made.answer.prompt_end, tools=offered)
    tokenizer = tokenizer_of(vocabulary())
    reader = AnswerReader(spec, tokenizer)
    assert reader.reasons and tokenizer.decode(reader.end_marker) == "</muse>"
    reader.feed(ANSWER)
    reader.end(cut=False)
    read_ = reader.answer("", 10**6, [])
    assert read_.reasoning == "Hm."
    assert [(call.name, json.loads(call.arguments)) for call in read_.calls] == [("look", {"where": "up"})]


def test_the_result_of_a_call_follows_it() -> None:
    call = wire.CallFields("call_1", "look", '{"where": "up"}', "complete")
    results = [{"role": "tool", "tool_call_id": "call_1", "content": "sky"}]
    end = byte_tokenizer(()).token_to_id(END)
    for last, begins in ((end, "<tool>"), (ord("x"), END)):
        made = written(jobs.Chat(results, last, first=False, calls=[call], asks=jobs.Asks(tools=[LOOK])))
        text = tokenizer_of(vocabulary()).decode(made.tokens, skip_special_tokens=False)
        assert text.startswith(begins) and text.endswith(f"sky{END}<assistant><muse>")


@pytest.mark.parametrize(
    ("asks", "field"),
    [
        (jobs.Asks(tools=[LOOK], tool_choice="required"), "tools"),
        (jobs.Asks(tools=[LOOK], parallel_tool_calls=False), "tools"),
        (jobs.Asks(constraint=jobs.ConstraintFields("regex", "a+", "regex")), "regex"),
    ],
)
def test_what_needs_a_grammar_is_refused_by_name(asks: jobs.Asks, field: str) -> None:
    refused = worker().answer(jobs.Chat(SAID, None, first=True, asks=asks))
    assert isinstance(refused, jobs.Refused)
    assert (refused.code, refused.param) == ("unsupported_grammar", field)
    assert "response template" in refused.message


def test_a_format_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(UnknownFormat, match="no response template"):
        AnswerReader(AnswerSpec("response-template"), tokenizer_of(vocabulary(own=None)))


# --- checkpoints ----------------------------------------------------------------------------------


def described(directory: Path, template: str, own: Any) -> str:
    """A small model whose tokenizer_config.json has that chat template and that response template."""
    path = write_small_model(directory) / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "chat_template": template, "response_template": own}
    path.write_text(json.dumps(config))
    return str(directory)


def formats(model: str, **options: Any) -> tuple[str | None, str | None]:
    with Engine(model, kv_tokens=256, **options) as engine:
        chosen = engine.loop.setup.formats
        return chosen.calls, chosen.reasoning


def test_a_checkpoint_of_an_unknown_family_is_read_by_its_own_template(tmp_path: Path) -> None:
    model = described(tmp_path, TEMPLATE, OWN)
    assert formats(model) == ("response-template", None)
    assert formats(model, tool_parser="hermes") == ("hermes", None)
    with Engine(model, kv_tokens=2048) as engine, engine.session(tools=[LOOK]) as session:
        turn = session.say("hi", Sampling(max_tokens=8))
        assert turn.answer is not None
        assert turn.answer.reasoning_tokens == 8, "the prompt opens the reasoning"


def test_a_parser_of_the_family_is_preferred(tmp_path: Path) -> None:
    model = described(tmp_path, HERMES, OWN)
    assert formats(model) == ("hermes", None)
    assert formats(model, tool_parser="response-template") == ("response-template", None)


@pytest.mark.parametrize("named", ["qwen3-coder", "mistral", "pythonic", "gemma4"])
def test_a_format_that_the_template_does_not_tell_the_model_is_refused(tmp_path: Path, named: str) -> None:
    """A template without tools: the model is told to write calls as Hermes does, whatever is named."""
    with pytest.raises(OptionError, match=f"tool_parser {named} cannot be used.*hermes") as refused:
        formats("echo", tool_parser=named)
    assert refused.value.option == "tool_parser"
    assert formats("echo", tool_parser="qwen3") == ("hermes", None)
    assert formats("echo", tool_parser="harmony") == ("harmony", None), "read on channels, tools or not"
    assert formats(described(tmp_path, HERMES, None), tool_parser=named) == (named, None)


@pytest.mark.parametrize("own", [None, "none", {"fields": {}}, {"start_anchor": "(", "fields": {"a": 5}}])
def test_a_template_that_cannot_be_used_is_left_out(tmp_path: Path, own: Any) -> None:
    model = described(tmp_path, TEMPLATE, own)
    assert formats(model) == (None, None)
    with pytest.raises(OptionError, match="tool_parser"):
        formats(model, tool_parser="response-template")
