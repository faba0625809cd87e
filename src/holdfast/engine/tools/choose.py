"""Which formats a checkpoint uses, read from its chat template, its tokens and its configuration.

A template shows how earlier calls were written, which is how the model writes them: the first row of the
table whose texts the template has, and none of the others, names the format. A checkpoint whose template says
nothing about calls is known by its `model_type`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Chosen:
    """Names of formats, as `formats` knows them; None where the checkpoint shows none.

    A model that shows no format of calls is told one, unless `calls` is `NO_CALLS`: then none is read.
    """

    calls: str | None
    reasoning: str | None


@dataclass(frozen=True, slots=True)
class _Sign:
    """A format, the texts that its templates have, and those that only other formats' templates have."""

    name: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


_CALL_SIGNS = (
    _Sign("harmony", ("<|channel|>", "<|message|>", "<|call|>")),
    _Sign("gemma4", ("<|tool_call>", "<tool_call|>", "call:")),
    _Sign("functiongemma", ("<start_function_call>", "<end_function_call>")),
    _Sign("qwen3-coder", ("<tool_call>", "<function=", "<parameter=")),
    _Sign("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    _Sign("mistral-json", ("[TOOL_CALLS]",)),
    _Sign("nemotron", ("<TOOLCALL>", "</TOOLCALL>")),
    _Sign("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>")),
    _Sign("hermes", ("<tool_call>", "</tool_call>", '"name"'), lacks=("<arg_key>", "<tool_calls>")),
    _Sign("pythonic", ("<|python_start|>",)),
    _Sign("pythonic", ("[func_name1(params_name1=params_value1",)),
    _Sign("llama3-json", ('"name"', '"parameters"', "ipython")),
    _Sign("llama3-json", ("<|python_tag|>", '"parameters"')),
)

_REASONING_SIGNS = (
    _Sign("gemma4", ("<|channel>", "<channel|>")),
    _Sign("mistral", ("[THINK]", "[/THINK]")),
    _Sign("seed", ("<seed:think>", "</seed:think>")),
    _Sign("think", ("<think>", "</think>")),
)

_CALLS_OF_TYPE: Mapping[str, str] = {
    "gpt_oss": "harmony",
    "gemma4": "gemma4",
    "qwen2": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "qwen3_5": "qwen3-coder",
    "qwen3_5_moe": "qwen3-coder",
    "granitemoehybrid": "hermes",
    "llama4": "pythonic",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
}


def choose(template: str | None, tokens: Collection[str], config: Mapping[str, Any]) -> Chosen:
    """The formats of a checkpoint. `tokens` are the texts of its added tokens."""
    source = (template or "").replace("\\", "").replace("'", '"')
    calls = _signed(_CALL_SIGNS, source)
    if calls is None and "<|tool_call_start|>" in tokens and "tools" in source:
        calls = "lfm2"  # Its older templates describe tools and leave out the markers of calls.
    if calls is None and template is None:
        calls = _CALLS_OF_TYPE.get(str(config.get("model_type", "")))
    reasoning = _signed(_REASONING_SIGNS, source)
    if reasoning is None and {"<think>", "</think>"} <= set(tokens):
        reasoning = "think"
    if calls == "harmony":
        reasoning = None  # Its machine separates the reasoning too.
    return Chosen(calls, reasoning)


def _signed(signs: tuple[_Sign, ...], source: str) -> str | None:
    """The first format whose signs a template has."""
    for sign in signs:
        if all(each in source for each in sign.has) and not any(each in source for each in sign.lacks):
            return sign.name
    return None
