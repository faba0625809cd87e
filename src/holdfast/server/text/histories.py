"""Compares a whole conversation with the history of its session, and finds the new part.

The session's tokens are decoded to the text that the model has read; the conversation is rendered by the chat
template. If the history is a prefix, the rest is new. Reasoning that the client or the template has
omitted is skipped: the session keeps it. Any other difference is an error that names the message. Used by
`process`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.engine.text.chat_template import ChatTemplateError, Message
from holdfast.engine.text.tokenizer import RenderedChat, Tokenizer
from holdfast.engine.tools.formats import reasoning_format
from holdfast.engine.tools.reasoning import ReasoningFormat
from holdfast.engine.tools.request import Tool, ToolsRefused

__all__ = ["Histories", "HistoryDiffers", "new_from"]


COMPARED_CHARACTERS = 1 << 14


class HistoryDiffers(ValueError):
    """A conversation does not begin with the session's history; `param` is the message that differs."""

    def __init__(self, place: int | None) -> None:
        self.param = "messages" if place is None else f"messages[{place}]"
        if place is None:
            said = "messages: they end before the session's history does"
        else:
            said = f"messages[{place}]: differs from the session's history"
        super().__init__(
            f"{said}; send only new messages, or leave out session_id, or fork or rewind the session"
        )


class Histories:
    """The comparison for one model; `reasoning` names how it marks its reasoning."""

    def __init__(self, tokenizer: Tokenizer, reasoning: str | None) -> None:
        self._tokenizer = tokenizer
        self._reasoning = None if reasoning is None else reasoning_format(reasoning)

    def end_in(
        self,
        rendered: RenderedChat,
        history: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
        template_kwargs: Mapping[str, Any],
        first: int = 0,
    ) -> int:
        """How many characters of a rendered conversation are the history; raises `HistoryDiffers`.

        The client's messages are those from `first` on.
        """
        new, at = new_from(rendered.text, self._tokenizer.answer_text(history), self._reasoning)
        if new is not None:
            return new
        if at == len(rendered.text):
            raise HistoryDiffers(None)

        def reaches(count: int) -> bool:
            """Whether the first messages reach past the difference."""
            try:
                some = self._tokenizer.render_chat(
                    messages[:count], tools=tools, template_kwargs=template_kwargs
                )
            except (ChatTemplateError, ToolsRefused):
                return False
            return _common(some.text, 0, rendered.text, 0) > at

        low, high = 1, len(messages)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle + 1, high)
        raise HistoryDiffers(max(0, low - 1 - first))


def new_from(text: str, history: str, reasoning: ReasoningFormat | None) -> tuple[int | None, int]:
    """Where a text continues after a history (None if they differ), and the length of the common part."""
    at = done = 0
    while True:
        same = _common(text, at, history, done)
        at, done = at + same, done + same
        if done == len(history):
            return at, at
        after = None if reasoning is None else _past_reasoning(text, at, history, done, reasoning)
        if after is None:
            return None, at
        at, done = after


def _past_reasoning(
    text: str, at: int, history: str, done: int, reasoning: ReasoningFormat
) -> tuple[int, int] | None:
    """The places after the reasoning of the history in which the two differ, or where it begins.

    None if the difference is elsewhere.
    """
    opens = history.rfind(reasoning.opens, 0, done + len(reasoning.opens))
    closes = history.find(reasoning.closes, opens + len(reasoning.opens)) if opens >= 0 else -1
    if closes < 0 or closes + len(reasoning.closes) <= done or done - opens > at:
        return None
    at -= done - opens
    if text.startswith(reasoning.opens, at):
        ends = text.find(reasoning.closes, at)
        if ends < 0:
            return None
        at = ends + len(reasoning.closes)
    return _past_space(text, at), _past_space(history, closes + len(reasoning.closes))


def _past_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _common(left: str, start: int, right: str, other: int) -> int:
    """How many characters two texts have in common from two places on."""
    most = min(len(left) - start, len(right) - other)
    same, size = 0, COMPARED_CHARACTERS
    while same < most and size:
        piece = left[start + same : start + same + min(size, most - same)]
        if right.startswith(piece, other + same):
            same += len(piece)
        else:
            size //= 2
    return same
