"""Conversations with tools, calls and results, rendered by one chat template.

Clients write messages in OpenAI's form. `prepare` checks them and brings them into the form that the template
takes (`engine.tools.rendering`), or writes tools, calls and results as ordinary text where the template knows
none (`plain_rendering`). `whole` renders a conversation, `continuation` what follows the last answer of an
append-only session. Between the two steps the caller disguises control tokens. Used by `tokenizer`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.engine.text.chat_roles import ChatTemplateError, Message
from holdfast.engine.text.chat_template import ChatTemplate
from holdfast.engine.tools.choose import choose
from holdfast.engine.tools.events import Call
from holdfast.engine.tools.plain_rendering import PLAIN_FORMAT, plain_messages
from holdfast.engine.tools.rendering import TemplateForm, probe, tail_after_calls, template_messages
from holdfast.engine.tools.request import Tool, ToolsRefused

__all__ = ["ChatRenderer", "Prepared"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Messages in the template's form, and the variables that the template gets with them."""

    messages: Sequence[Message]
    variables: Mapping[str, Any]


class ChatRenderer:
    """One template, and how it takes tools."""

    def __init__(
        self, template: ChatTemplate, tokens: Collection[str], call_format: str | None = None
    ) -> None:
        """`tokens` are the texts of added tokens. Without a `call_format` the template shows the model's."""
        self._template = template
        self._form = probe(template.render_unchecked, ChatTemplateError)
        shown = call_format or choose(template.source, tokens, {}).calls
        self.is_plain = shown is None or not self._form.shows_calls
        """Whether tools, calls and results are text of ordinary messages."""
        self.call_format = PLAIN_FORMAT if shown is None or self.is_plain else shown
        """How the model is told to write calls: a name in `engine.tools.formats`."""

    def prepare(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        calls: Sequence[Call] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """Messages after an answer with `calls`, if any; raises `ToolsRefused` with the field's name."""
        _require_answered(messages, calls)
        names = {call.id: call.name for call in calls}
        made = template_messages(messages, TemplateForm() if self.is_plain else self._form, names)
        given = dict(variables or {})
        if self.is_plain:
            return Prepared(plain_messages(made, tools), given)
        if tools:
            given["tools"] = [tool.in_openai_form() for tool in tools]
        return Prepared(made, given)

    def whole(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of a whole conversation."""
        return self._template.render(messages, **variables)

    def continuation(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        calls: Sequence[Call] = (),
        said_end: str = "",
    ) -> str:
        """The text that follows the last answer, which ended in `calls` and with the end token `said_end`."""
        answers = bool(messages) and messages[0].get("role") == "tool"
        if not answers:
            return self._template.continuation(messages, said_end=said_end, **variables)
        render = partial(self._template.render, known=2, **variables)
        tail = tail_after_calls(render, self.call_format, calls, messages, self._form)
        return tail.removeprefix(said_end)


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
