"""Chat templates: messages in, the text that the model was trained to see out.

Templates are Jinja programs that come with a model, so they run in Jinja's immutable sandbox with caps on
the size of the template, of what it renders and of what it may multiply. The names and filters are those that
templates written for Hugging Face models expect. Sessions are append-only: `continuation` renders what a new
turn adds after what was said, and never rewrites it. Used by `tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from holdfast.engine.text.chat_roles import ChatTemplateError, Message, MessagesRefused, ShownRoles

__all__ = ["ChatTemplate", "ChatTemplateError", "Message"]

TEMPLATE_CHARACTERS_MAX = 1 << 20
OUTPUT_CHARACTERS_MAX = 1 << 24
PRODUCT_MAX = 1 << 20
"""Largest string or list that a template may make by multiplication, and largest power."""

_MARK = "\ue000said\ue000"
"""Stands for what the assistant said; of private-use characters, which no template treats in its own way."""


class _Generation(jinja2.ext.Extension):
    """The tag that some templates put around what the assistant says; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """No attribute of Python's insides, no change of what is passed in, no huge products."""

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
            raise jinja2.exceptions.SecurityError(f"a product of that size is not allowed ({operator})")
        return super().call_binop(context, operator, left, right)


@jinja2.pass_context
def _as_it_is(_context: jinja2.runtime.Context, value: Any) -> Any:
    """What a template writes. Since it asks for the context, Jinja computes no constants when it compiles a
    template, where nothing bounds them."""
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


class ChatTemplate:
    """One compiled template. `tokens` are the special tokens that it may name, such as bos_token."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > TEMPLATE_CHARACTERS_MAX:
            raise ChatTemplateError(f"the chat template is longer than {TEMPLATE_CHARACTERS_MAX} characters")
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            optimized=False,
            finalize=_as_it_is,
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        self.source = source
        self._tokens = dict(tokens)
        self._roles = ShownRoles(self._rendered)
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateError as error:
            raise ChatTemplateError(f"the chat template cannot be compiled: {error}") from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a whole conversation; `variables` are handed to the template as they are.

        No message is left out: one that the template would not show is refused. Where it knows no role
        `developer`, such messages are the system's.
        """
        return self._rendered(
            self._roles.fitted(messages), add_generation_prompt=add_generation_prompt, **variables
        )

    def _rendered(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """What the template makes of messages, whatever it leaves out."""
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
            raise ChatTemplateError("the chat template needs too much memory for these messages") from None
        except RecursionError:
            raise ChatTemplateError("the chat template calls itself too deeply for these messages") from None
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
        """What follows the assistant's last words when the conversation goes on with `messages`.

        `said_end` is the text of the end token that the assistant's words already carry; the template's own
        end of message is then not repeated. What was said before is never rendered again, so templates that
        drop earlier reasoning leave it where it is.
        """
        before: list[Message] = [
            {"role": "user", "content": "..."},
            {"role": "assistant", "content": _MARK},
        ]
        fitted = self._roles.fitted([*before, *messages], known=len(before))
        rendered = self._rendered(fitted, **variables)
        _, mark, tail = rendered.partition(_MARK)
        if not mark or _MARK in tail:
            raise ChatTemplateError(
                "the chat template does not render what the assistant said as it was said"
            )
        return tail.removeprefix(said_end)
