"""A response as a route asks for it, whatever the transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.engine.sampling import Sampling
from holdfast.server.dialects.answer_options import AnswerOptions
from holdfast.server.dialects.turn_options import TurnOptions
from holdfast.server.responses.form import Note
from holdfast.server.responses.ids import Place
from holdfast.server.responses.items import Item
from holdfast.server.responses.tools import ToolSet
from holdfast.server.turn_request import Input, TurnAsked

__all__ = ["Creation"]


@dataclass(frozen=True, slots=True)
class Creation:
    """A response to create.

    `items` are checked and may hold references. `shown` are other fields of the response object. `fields`
    maps declared field names to those of the dialect. With `truncates`, items are dropped from the beginning
    of a conversation that does not fit.
    """

    items: list[Item]
    instructions: str | None
    tools: ToolSet
    sampling: Sampling
    options: TurnOptions
    answer: AnswerOptions
    shown: dict[str, Any]
    told: dict[str, Any]
    """Instructions and tools as the response shows them: they are kept with the session."""
    fields: Mapping[str, str]
    created: float
    previous: Place | None = None
    history: Sequence[Item] = ()
    """Items before those of the input, where there is no previous response."""
    conversation: str | None = None
    """The key of a conversation."""
    stored: bool = True
    in_place: bool = True
    """Whether the session of the previous response may be continued; if not, it is forked."""
    background: bool = False
    streams: bool = False
    truncates: bool = False
    sealed: bool = False
    prewarms: bool = False
    """Whether the prompt alone is computed: the response is complete and empty."""

    def note(self, items: list[Item], history: list[Item]) -> Note:
        """Its stored data, with items that have ids."""
        return Note(
            self.created,
            self.shown,
            items,
            history,
            self.tools.kinds,
            sealed=self.sealed,
            stored=self.stored,
            prewarms=self.prewarms,
        )

    def turn(self, name: str, messages: list[dict[str, Any]], note: str | None) -> TurnAsked:
        """The turn of it: messages are always appended."""
        return TurnAsked(
            Input(messages=messages),
            self.sampling,
            name,
            replace(self.options, append_history=True),
            self.answer,
            fields=self.fields,
            note=note,
        )
