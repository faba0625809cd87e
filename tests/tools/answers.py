"""Answers in each format, with what they mean; and how tests feed them to a parser."""
# ruff: noqa: E501 (each answer on one line)

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.engine.tools.events import Call, Event, Outcome, Transcript
from holdfast.engine.tools.formats import call_format, reasoning_format
from holdfast.engine.tools.machine import OfferedTools
from holdfast.engine.tools.parser import AnswerParser

OFFERED = OfferedTools(
    {
        "f": {
            "a": ("integer",),
            "b": ("string",),
            "c": ("array",),
            "d": ("object",),
            "e": ("boolean",),
            "n": ("string", "null"),
            "x": ("null", "number"),
        },
        "g": {},
        "ns.h": {"q": ("string",)},
    }
)


@dataclass(frozen=True)
class Answer:
    """One answer: `calls` are (name, arguments) or (name, arguments, outcome)."""

    format: str | None
    wire: str
    text: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, str] | tuple[str, str, Outcome]] = ()
    thinks: str | None = None
    is_open: bool = False
    offered: OfferedTools | None = field(default=OFFERED, repr=False)

    @property
    def expected(self) -> tuple[str, str, list[tuple[str, str, Outcome]]]:
        """What a transcript must say."""
        return (
            self.text,
            self.reasoning,
            [(each[0], each[1], each[2] if len(each) > 2 else Outcome.COMPLETE) for each in self.calls],
        )  # type: ignore[misc]

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers of its formats."""
        calls = call_format(self.format) if self.format else None
        if calls is not None and calls.reasons:
            return calls.markers
        return (calls.markers if calls is not None else ()) + (
            reasoning_format(self.thinks).markers if self.thinks else ()
        )

    def parser(self, tokens: dict[int, str] | None = None) -> AnswerParser:
        """A parser for it."""
        return AnswerParser(
            call_format(self.format) if self.format else None,
            reasoning_format(self.thinks) if self.thinks else None,
            tokens or {},
            call_id=lambda index: f"call_{index}",
            offered=self.offered,
            reasoning_is_open=self.is_open,
        )

    def pieces(self, tokens: dict[int, str]) -> list[str | int]:
        """The answer as characters and marker tokens."""
        ids = {text: token for token, text in tokens.items()}
        if not ids:
            return list(self.wire)
        pattern = "|".join(re.escape(text) for text in sorted(ids, key=len, reverse=True))
        pieces: list[str | int] = []
        for part in re.split(f"({pattern})", self.wire):
            pieces.extend([ids[part]] if part in ids else list(part))
        return pieces


def parsed(parser: AnswerParser, pieces: Iterable[str | int]) -> list[Event]:
    """The events of an answer that arrives in these pieces: texts, and ids of marker tokens."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece) if isinstance(piece, str) else parser.mark(piece)
    return events + parser.finish()


def meaning(events: Iterable[Event]) -> tuple[str, str, list[tuple[str, str, Outcome]]]:
    """Text, reasoning and calls of an answer."""
    transcript = Transcript(events)
    return transcript.text, transcript.reasoning, [_shown(call) for call in transcript.calls]


def _shown(call: Call) -> tuple[str, str, Outcome]:
    return call.name, call.arguments, call.outcome


BROKEN, CUT = Outcome.BROKEN, Outcome.CUT
F1 = ("f", '{"a": 1}')

HERMES = [
    Answer("hermes", "Just text, no call.", text="Just text, no call."),
    Answer("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', calls=[F1]),
    Answer(
        "hermes",
        'I look. \n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call>\n',
        text="I look.",
        calls=[F1, ("g", "{}")],
    ),
    Answer(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nDone. ',
        text="\nDone. ",
        calls=[F1],
    ),
    Answer(
        "hermes",
        '<tool_call>{"arguments": {"b": "}\\"{"}, "id": [1, {"z": null}], "name": "f"}</tool_call>',
        calls=[("f", '{"b": "}\\"{"}')],
    ),
    Answer("hermes", '<tool_call>{"name": "g"}</tool_call>', calls=[("g", "{}")]),
    Answer("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', calls=[("g", "{}")]),
    Answer(
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        calls=[("f", '{"a": 1}')],
    ),
    Answer(
        "hermes", '<tool_call>{"name": "f", "arguments": "no"}</tool_call>', calls=[("f", "no", BROKEN)]
    ),
    Answer(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"b": "</tool_call> and <tool_call>"}}</tool_call>',
        calls=[("f", '{"b": "</tool_call> and <tool_call>"}')],
    ),
    Answer(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"b": "Grüße 😀 \\ud83d\\ude00 \\n", "c": [-1.5e3, true, null]}}</tool_call>',
        calls=[("f", '{"b": "Grüße 😀 \\ud83d\\ude00 \\n", "c": [-1.5e3, true, null]}')],
    ),
    Answer("hermes", "<tool_call> is a marker", text="<tool_call> is a marker"),
    Answer("hermes", "<tool_call>{}</tool_call>", text="<tool_call>{}</tool_call>"),
    Answer("hermes", "<tool_call", text="<tool_call"),
    Answer("hermes", "a <b> <tool_c <tool_call>", text="a <b> <tool_c <tool_call>"),
    Answer(
        "hermes",
        '<tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>',
        text="<tool_call>",
        calls=[("g", "{}")],
    ),
    Answer("hermes", '<tool_call>{"name": 5}</tool_call>', text='<tool_call>{"name": 5}</tool_call>'),
    Answer(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call> ok',
        text=" ok",
        calls=[("f", '{"a": 1,}}', BROKEN)],
    ),
    Answer(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"b": "x\ny"}}</tool_call>',
        calls=[("f", '{"b": "x\ny"}}', BROKEN)],
    ),
    Answer("hermes", '<tool_call>{"name": "f", "arguments": {"b": "half', calls=[("f", '{"b": "half', CUT)]),
    Answer("hermes", '<tool_call>\n{"name": "f", "argu', text='<tool_call>\n{"name": "f", "argu'),
    Answer(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "7"}',
        calls=[F1],
    ),
    Answer("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>', calls=[("f", '{"a": tru}}', BROKEN)]),
    Answer("hermes", "  \n", text="  \n"),
    Answer("hermes", ""),
    Answer("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>', calls=[F1, ("g", "{}")]),
    Answer("nemotron", "<TOOLCALL>[]</TOOLCALL>", text="<TOOLCALL>[]</TOOLCALL>"),
]  # fmt: skip

LLAMA = [
    Answer("llama3-json", '{"name": "f", "parameters": {"a": 1}}', calls=[F1]),
    Answer("llama3-json", '<|python_tag|>{"name": "zzz", "parameters": {"a": 1}}', calls=[("zzz", '{"a": 1}')]),
    Answer("llama3-json", '\n {"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', calls=[F1, ("g", "{}")]),
    Answer("llama3-json", '{"name": "Bob", "parameters": {"a": 1}}', text='{"name": "Bob", "parameters": {"a": 1}}'),
    Answer("llama3-json", 'So: {"name": "f", "parameters": {"a": 1}}', text='So: {"name": "f", "parameters": {"a": 1}}'),
    Answer("llama3-json", '{"answer": [1, 2]} is it', text='{"answer": [1, 2]} is it'),
    Answer("llama3-json", '{"name": "f", "parameters": {"a" 1}} x', text="1}} x", calls=[("f", '{"a" ', BROKEN)]),
    Answer("llama3-json", "<|python_tag|>brave_search.call(query=\"x\")", text='<|python_tag|>brave_search.call(query="x")'),
    Answer("llama3-json", "[1, 2]", text="[1, 2]"),
]  # fmt: skip
PYTHONIC = [
    Answer("pythonic", "[f(a=1, b='it\\'s \"x\"', e=True), g()]", calls=[("f", '{"a": 1, "b": "it\'s \\"x\\"", "e": true}'), ("g", "{}")]),
    Answer("pythonic", '[ns.h( q = "é\\n\\x41\\u00e9\\d" )]\n', calls=[("ns.h", '{"q": "é\\nAé\\\\d"}')]),
    Answer("pythonic", "[f(c=[1, 'a', None], d={'k': {\"l\": -2.5}})] ok", text="ok", calls=[("f", '{"c": [1, "a", null], "d": {"k": {"l": -2.5}}}')]),
    Answer("pythonic", "<|python_start|>[zzz(a=1)]<|python_end|>", calls=[("zzz", '{"a": 1}')]),
    Answer("pythonic", "[see](http://x)", text="[see](http://x)"),
    Answer("pythonic", "[1, 2]", text="[1, 2]"),
    Answer("pythonic", "[f(a=1), 2]", text=" 2]", calls=[("f", '{"a": 1}')]),
    Answer("pythonic", "[f(1)]", text=")]", calls=[("f", "", BROKEN)]),
    Answer("pythonic", "[f(a=x)]", text=")]", calls=[("f", '{"a": ', BROKEN)]),
    Answer("pythonic", "[f(b='half", calls=[("f", '{"b": "half', CUT)]),
    Answer("pythonic", "text [f(a=1)]", text="text [f(a=1)]"),
    Answer("lfm2", "Ok.<|tool_call_start|>[f(a=1)]<|tool_call_end|>", text="Ok.", calls=[F1]),
]  # fmt: skip

MISTRAL = [
    Answer("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', calls=[F1]),
    Answer("mistral", 'Hi [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', text="Hi", calls=[F1, ("g", "{}")]),
    Answer("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]', calls=[F1, ("g", "{}")]),
    Answer("mistral", "[TOOL_CALLS] and [ARGS] are markers", text="[TOOL_CALLS] and [ARGS] are markers"),
    Answer("mistral", '[TOOL_CALLS]f[ARGS]{"a": }', text="}", calls=[("f", '{"a": ', BROKEN)]),
    Answer("mistral", "[TOOL_CALLS]f[ARGS]5", text="5", calls=[("f", "", BROKEN)]),
    Answer("mistral", "[TOOL_CALLS]f[ARGS", text="[TOOL_CALLS]f[ARGS"),
    Answer("mistral", '[THINK]hm\n[/THINK]\n[TOOL_CALLS]f[ARGS]{"a": 1}', reasoning="hm", calls=[F1], thinks="mistral"),
]  # fmt: skip

XML = [
    Answer("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntwo\n\"lines\"\n</parameter>\n</function>\n</tool_call>", calls=[("f", '{"a": 1, "b": "two\\n\\"lines\\""}')]),
    Answer("qwen3-coder", "Ok\n\n<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=e>\nTrue\n</parameter>\n<parameter=c>\n[1, \"x\"]\n</parameter>\n<parameter=d>\n{\"k\": 1}\n</parameter>\n</function>\n</tool_call>", text="Ok", calls=[("g", "{}"), ("f", '{"e": true, "c": [1, "x"], "d": {"k": 1}}')]),
    Answer("qwen3-coder", "<function=f><parameter=n>None</parameter><parameter=x>None</parameter><parameter=zz>5</parameter></function>", calls=[("f", '{"n": "None", "x": null, "zz": "5"}')]),
    Answer("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\nmany\n</parameter>\n</function>\n</tool_call>", calls=[("f", '{"a": "many"}')]),
    Answer("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=b>\n<tool_call> </function> é😀\n\n\n</parameter>\n</function>", calls=[("f", '{"b": "<tool_call> </function> é😀\\n\\n"}')]),
    Answer("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call> ok", text=" ok", calls=[("f", '{"a": 1}')]),
    Answer("qwen3-coder", "<tool_call>\n<function=f>\noops</function>", text="oops</function>", calls=[("f", "", BROKEN)]),
    Answer("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=b>\nhalf", calls=[("f", '{"b": "half', CUT)]),
    Answer("qwen3-coder", "<tool_call>\n<function=", text="<tool_call>\n<function="),
    Answer("qwen3-coder", "<tool_call> or <function= or <parameter=x>", text="<tool_call> or <function= or <parameter=x>"),
    Answer("qwen3-coder", "thinking\n</think>\n\n<tool_call>\n<function=g>\n</function>\n</tool_call>", reasoning="thinking", calls=[("g", "{}")], thinks="think", is_open=True),
]  # fmt: skip

Q = '<|"|>'
GEMMA = [
    Answer("gemma4", f"<|tool_call>call:f{{a:1,b:{Q}say \"hi\"\n{Q},c:[1,{Q}x{Q}],d:{{k:{{l:true}}}}}}<tool_call|>", calls=[("f", '{"a": 1, "b": "say \\"hi\\"\\n", "c": [1, "x"], "d": {"k": {"l": true}}}')]),
    Answer("gemma4", "<|tool_call>call:g{}<tool_call|><|tool_call>call:f{a:1}<tool_call|>", calls=[("g", "{}"), ("f", '{"a": 1}')]),
    Answer("gemma4", f"<|channel>thought\nLook.\n<channel|>Hi<|tool_call>call:f{{b:{Q}{Q}}}<tool_call|>", text="Hi", reasoning="Look.", calls=[("f", '{"b": ""}')], thinks="gemma4"),
    Answer("gemma4", "<|channel>though", reasoning="though", thinks="gemma4"),
    Answer("functiongemma", "<start_function_call>call:f{b:<escape>Bern<escape>,a:1}<end_function_call>", calls=[("f", '{"b": "Bern", "a": 1}')]),
    Answer("gemma4", "<|tool_call>f{}<tool_call|>", text="<|tool_call>f{}<tool_call|>"),
    Answer("gemma4", "<|tool_call>call:f{a:x}<tool_call|>", text="}<tool_call|>", calls=[("f", '{"a": ', BROKEN)]),
]  # fmt: skip

HARMONY = [
    Answer("harmony", '<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', reasoning="Need it.", calls=[F1]),
    Answer("harmony", "<|channel|>final<|message|>Hello\n<|return|>", text="Hello"),
    Answer("harmony", "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B <x> C", text="B <x> C", reasoning="A"),
    Answer("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', calls=[F1]),
    Answer("harmony", "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|call|>", text="I will look.", calls=[("g", "{}")]),
    Answer("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": 1<|call|>', calls=[("f", '{"a": 1', BROKEN)]),
    Answer("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": 1', calls=[("f", '{"a": 1', CUT)]),
    Answer("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": 1}', calls=[F1]),
    Answer("harmony", "<|channel|>commentary to=python code<|message|>print(1)<|call|>", calls=[("python", "print(1)", BROKEN)]),
    Answer("harmony", "<|channel|>commentary to=functions.g<|message|>null<|call|>", calls=[("g", "null", BROKEN)]),
    Answer("harmony", "the plain answer", text="the plain answer"),
    Answer("harmony", "to be or not", text="to be or not"),
    Answer("harmony", "<|channel|>commentary to=fun", text="<|channel|>commentary to=fun"),
    Answer("harmony", '<|channel|>commentary to=functions.f<|message|>{"b": "<|x|>"} x<|call|>', text=" x", calls=[("f", '{"b": "<|x|>"}')]),
]  # fmt: skip

REASONING = [
    Answer(None, "<think>\nHm.\n\nSo.\n</think>\n\nYes.", text="Yes.", reasoning="Hm.\n\nSo.", thinks="think"),
    Answer(None, "\n<think></think>Yes.", text="Yes.", thinks="think"),
    Answer(None, "Hm.</think>Yes.\n", text="Yes.\n", reasoning="Hm.", thinks="think", is_open=True),
    Answer(None, "Hm.", reasoning="Hm.", thinks="think", is_open=True),
    Answer(None, "No thoughts </think> here", text="No thoughts </think> here", thinks="think"),
    Answer(None, "\n\nText first.", text="\n\nText first.", thinks="think"),
    Answer("hermes", '<think>\n<tool_call> maybe\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', reasoning="<tool_call> maybe", calls=[F1], thinks="think"),
    Answer("llama3-json", '<think>x</think>\n{"name": "f", "parameters": {"a": 1}}', reasoning="x", calls=[F1], thinks="think"),
]  # fmt: skip

ANSWERS = [*HERMES, *LLAMA, *PYTHONIC, *MISTRAL, *XML, *GEMMA, *HARMONY, *REASONING]
