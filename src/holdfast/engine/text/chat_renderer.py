"""Conversations with tools, calls and results, rendered by one chat template.

Clients write messages in OpenAI's form. `prepare` checks them and brings them into the form that the template
takes (`engine.tools.rendering`), or writes tools, calls and results as ordinary text if the template does not
support them (`plain_rendering`). `whole` renders a conversation, `continuation` the new messages of an
append-only session. Between the two steps the caller disguises control tokens. Used by `tokenizer`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from holdfast.engine.text.chat_roles import Message, MessagesRefused
from holdfast.engine.text.chat_template import ChatTemplate, PromptEnd
from holdfast.engine.tools.choose import choose
from holdfast.engine.tools.events import Call
from holdfast.engine.tools.formats import NO_CALLS, RESPONSE_TEMPLATE
from holdfast.engine.tools.plain_rendering import PLAIN_FORMAT, plain_messages
from holdfast.engine.tools.rendering import TemplateForm, probe, tail_after_calls, template_messages
from holdfast.engine.tools.request import Tool, ToolsRefused
from holdfast.engine.tools.response_template import ResponseTemplate

__all__ = ["ChatRenderer", "Prepared"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Messages in the template's form, and the variables that the template gets with them."""

    messages: Sequence[Message]
    variables: Mapping[str, Any]


class ChatRenderer:
    """One template, and how it takes tools."""

    def __init__(
        self,
        template: ChatTemplate,
        tokens: Collection[str],
        call_format: str | None = None,
        own: ResponseTemplate | None = None,
    ) -> None:
        """`tokens` are the texts of added tokens.

        Without a `call_format`, or where calls are not read, the template shows the model's.
        `own` is the checkpoint's description of its answers.
        """
        self._own = own if call_format == RESPONSE_TEMPLATE else None
        self._template = template
        named = None if call_format == NO_CALLS else call_format
        self._shown_format = named or choose(template.source, tokens, {}).calls

    @cached_property
    def _form(self) -> TemplateForm:
        """How the template takes calls and results: found out by rendering some, when first needed."""
        return probe(self._template.render_unchecked, MessagesRefused)

    @property
    def is_plain(self) -> bool:
        """Whether tools, calls and results are text of ordinary messages."""
        return self._shown_format is None or not self._form.shows_calls

    @property
    def call_format(self) -> str:
        """How the model is told to write calls: a name in `engine.tools.formats`."""
        return PLAIN_FORMAT if self._shown_format is None or self.is_plain else self._shown_format

    def prepare(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        calls: Sequence[Call] = (),
        continues: bool = False,
    ) -> Prepared:
        """Messages of a conversation, or after an answer with `calls` where they continue one.

        Raises `ToolsRefused` with the field's name.
        """
        _require_answered(messages, calls)
        given = dict(variables or {})
        if not tools and not any(_has_calls(message) for message in messages):
            return Prepared(template_messages(messages, TemplateForm()), given)
        names = {call.id: call.name for call in calls}
        if self.is_plain:
            made = template_messages(messages, TemplateForm(), names)
            return Prepared(plain_messages(made, () if continues else tools), given)
        if tools:
            given["tools"] = [tool.in_openai_form() for tool in tools]
        return Prepared(template_messages(messages, self._form, names), given)

    def whole(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        prompt_end: PromptEnd = PromptEnd.ANSWER,
    ) -> str:
        """The text of a whole conversation."""
        return self._template.render(messages, prompt_end=prompt_end, **variables)

    def opening(self, variables: Mapping[str, Any]) -> str:
        """The template's generation prompt; empty if the template refuses to show it."""
        said = [{"role": "user", "content": "..."}]
        try:
            with_it = self._template.render_unchecked(said, **variables)
            without = self._template.render_unchecked(said, **{**variables, "add_generation_prompt": False})
        except MessagesRefused:
            return ""
        return with_it.removeprefix(without) if with_it.startswith(without) else ""

    def continuation(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        calls: Sequence[Call] = (),
        said_end: str = "",
        prompt_end: PromptEnd = PromptEnd.ANSWER,
    ) -> str:
        """The text that follows the last answer, which ended in `calls` and with the end token `said_end`."""
        variables = {**variables, "prompt_end": prompt_end}
        answers = bool(messages) and messages[0].get("role") == "tool"
        if not answers:
            return self._template.continuation(messages, said_end=said_end, **variables)
        render = partial(self._template.render, known=2, **variables)
        tail = tail_after_calls(render, self.call_format, calls, messages, self._form, self._own)
        return tail.removeprefix(said_end)


def _has_calls(message: Message) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _require_answered(messages: Sequence[Message], calls: Sequence[Call]) -> None:
    """Raise for a tool message that answers no call before it."""
    known: set[object] = {call.id for call in calls}
    for place, message in enumerate(messages):
        made = message.get("tool_calls")
        if isinstance(made, Sequence):
            known.update(call.get("id") for call in made if isinstance(call, Mapping))
        if message.get("role") == "tool" and message.get("tool_call_id") not in known:
            raise ToolsRefused(
                f"messages[{place}].tool_call_id",
                "is not the id of a tool call of this conversation, or of the session's last turn",
            )
