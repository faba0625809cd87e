"""Chat templates: from messages to the model's prompt text.

Templates are untrusted Jinja programs that come with a model, so they run in Jinja's immutable sandbox with
limits on the size of the template, its output and its products. Names and filters are those of Hugging Face's
templates. Sessions are append-only: `continuation` renders only the text that a new turn adds after the
assistant's last answer. Used by `tokenizer`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from holdfast.engine.text.chat_roles import ChatTemplateError, Message, MessagesRefused, ShownRoles

__all__ = ["ChatTemplate", "ChatTemplateError", "Message", "PromptEnd", "prompt_end_of"]

TEMPLATE_CHARACTERS_MAX = 1 << 20
OUTPUT_CHARACTERS_MAX = 1 << 24
PRODUCT_MAX = 1 << 20
"""Limit of strings and lists that a template makes by multiplication, and of powers."""

_MARK = "\ue000said\ue000"
"""Marks the assistant's answer; private-use characters, which templates do not treat specially."""

_OPEN = "\ue000open\ue000"
"""Marks the end of a final message that the answer continues."""


class PromptEnd(StrEnum):
    """Where a rendered prompt ends, and the answer begins."""

    ANSWER = "answer"
    """After the generation prompt: the answer is a message of its own."""
    MESSAGE = "message"
    """After the last message, without a generation prompt."""
    OPEN = "open"
    """Inside the last message: the answer continues it."""


def prompt_end_of(messages: Sequence[Mapping[str, Any]]) -> PromptEnd:
    """Where messages end that stand for a whole turn: a last message of the assistant's is its answer."""
    return PromptEnd.OPEN if messages and messages[-1].get("role") == "assistant" else PromptEnd.ANSWER


class _Generation(jinja2.ext.Extension):
    """The `generation` tag that some templates put around the assistant's answers; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox: no private attributes, no mutation of arguments, no huge products."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        values = (left, right)
        if operator == "**":
            limited = all(isinstance(value, int | float) and abs(value) <= 1024 for value in values)
        else:
            sizes = [len(value) for value in values if isinstance(value, str | list | tuple)]
            counts = [value for value in values if isinstance(value, int)]
            limited = not sizes or max(sizes) * max(counts, default=1) <= PRODUCT_MAX
        if not limited:
            raise jinja2.exceptions.SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


@jinja2.pass_context
def _as_it_is(_context: jinja2.runtime.Context, value: Any) -> Any:
    """A no-op finalizer. It takes the context, which keeps Jinja from folding constants at compile time,
    where no limit applies.
    """
    return value


def _refuse(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    """A template, compiled once: a model's tokenizers share it, as rendering leaves nothing in it."""
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,
        finalize=_as_it_is,
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    return environment.from_string(source)


class ChatTemplate:
    """One compiled template. `tokens` are the special tokens that it may name, such as bos_token."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > TEMPLATE_CHARACTERS_MAX:
            raise ChatTemplateError(f"the chat template is longer than {TEMPLATE_CHARACTERS_MAX} characters")
        self.source = source
        self._tokens = dict(tokens)
        self._roles = ShownRoles(self.render_unchecked)
        try:
            self._template = _compiled(source)
        except jinja2.exceptions.TemplateError as error:
            raise ChatTemplateError(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        known: int = 0,
        prompt_end: PromptEnd = PromptEnd.ANSWER,
        **variables: Any,
    ) -> str:
        """The text of a whole conversation; `variables` are passed to the template.

        A message that the template would skip is rejected; the first `known` are not the client's.
        `developer` messages become `system` where the template does not know that role.
        """
        fitted = self._roles.fitted(messages, known, **variables)
        asks = variables.pop("add_generation_prompt", True) and prompt_end is PromptEnd.ANSWER
        if prompt_end is not PromptEnd.OPEN:
            return self.render_unchecked(fitted, add_generation_prompt=asks, **variables)
        marked = [*fitted[:-1], {**fitted[-1], "content": f"{fitted[-1].get('content') or ''}{_OPEN}"}]
        rendered = self.render_unchecked(marked, add_generation_prompt=False, **variables)
        text, mark, _ = rendered.partition(_OPEN)
        if not mark:
            raise MessagesRefused("the chat template does not show the final message, so it cannot go on")
        return text

    def render_unchecked(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render messages, without the check for skipped ones."""
        names = {**self._tokens, **variables}
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **names
            ):
                size += len(piece)
                if size > OUTPUT_CHARACTERS_MAX:
                    raise ChatTemplateError(
                        f"the chat template renders more than {OUTPUT_CHARACTERS_MAX} characters"
                    )
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except MemoryError:
            raise ChatTemplateError("the chat template runs out of memory for these messages") from None
        except RecursionError:
            raise ChatTemplateError("the chat template recurses too deeply for these messages") from None
        except (
            jinja2.exceptions.TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise MessagesRefused(f"the chat template refuses these messages: {error}") from error
        return "".join(pieces)

    def continuation(self, messages: Sequence[Message], *, said_end: str = "", **variables: Any) -> str:
        """The text that follows the assistant's last answer when the conversation goes on with `messages`.

        `said_end` is the end token that the answer already carries; the template's own end of message is then
        not repeated. Earlier messages are never rendered again, so templates that drop earlier reasoning do
        not change the history.
        """
        before: list[Message] = [
            {"role": "user", "content": "..."},
            {"role": "assistant", "content": _MARK},
        ]
        rendered = self.render([*before, *messages], known=len(before), **variables)
        _, mark, tail = rendered.partition(_MARK)
        if not mark or _MARK in tail:
            raise ChatTemplateError(
                "the chat template changes the assistant's answer, so a session cannot continue it"
            )
        return tail.removeprefix(said_end)
