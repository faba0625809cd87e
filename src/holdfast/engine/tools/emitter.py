"""Collects the events of one answer and keeps their wire form whole.

A machine says what it read: text, reasoning, parts of a call, or markup, which becomes the wire form of the
next event. White space between text and a call, around reasoning and between calls is markup too: it is held
back until the next character tells.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.engine.tools.events import CallArguments, CallBegin, CallEnd, Event, Outcome, Reasoning, Text

SPACE_HELD_MAX = 256
"""White space beyond this is text at once."""


class Emitter:
    """`call_id` names the calls by index."""

    __slots__ = (
        "_after_call",
        "_call_id",
        "_events",
        "_index",
        "_loose",
        "_markup",
        "_open",
        "_space",
        "_spaced",
        "_trims",
    )

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self._call_id = call_id
        self._events: list[Event] = []
        self._index = -1
        self._open = False
        self._markup = ""
        self._space = ""
        """White space that ended the text or the reasoning so far; follows `_markup`."""
        self._spaced: type[Text] | type[Reasoning] = Text
        self._loose = False
        """Whether the present run of white space was too long to be held."""
        self._after_call = False
        self._trims = False
        """Whether white space here is markup, since reasoning has just ended or begun."""

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def text(self, wire: str) -> None:
        """Text of the answer."""
        self._say(Text, wire)

    def reasoning(self, wire: str) -> None:
        """Text of the reasoning."""
        self._say(Reasoning, wire)

    def _say(self, kind: type[Text] | type[Reasoning], wire: str) -> None:
        if self._spaced is not kind:
            self._settle_space()
            self._spaced, self._loose = kind, False
        if self._trims:
            words = wire.lstrip()
            self._markup += wire[: len(wire) - len(words)]
            if not words:
                if len(self._markup) > SPACE_HELD_MAX:
                    self._flush_markup(kind)
                return
            wire, self._trims = words, False
        words = wire.rstrip()
        if words:
            self._loose = len(wire) - len(words) > SPACE_HELD_MAX
            words = wire if self._loose else words
            said, self._space = self._space + words, wire[len(words) :]
        elif self._loose or len(self._space) + len(wire) > SPACE_HELD_MAX:
            said, self._space, self._loose = self._space + wire, "", True
        else:
            self._space += wire
            return
        self._after_call = False
        self._events.append(kind(said, self._take_markup() + said))

    def _flush_markup(self, kind: type[Text] | type[Reasoning]) -> None:
        """Emit markup that has grown long as an event without text."""
        self._events.append(kind("", self._take_markup()))

    def _settle_space(self) -> None:
        """Emit held white space as its own kind."""
        if self._space:
            space, self._space = self._space, ""
            self._events.append(self._spaced(space, self._take_markup() + space))

    def _drop_space(self) -> None:
        """Make held white space markup."""
        self._markup += self._space
        self._space = ""

    def _take_markup(self) -> str:
        markup, self._markup = self._markup, ""
        return markup

    def markup(self, wire: str) -> None:
        """Markers and separators: no part of the answer."""
        self._settle_space()
        self._markup += wire
        if len(self._markup) > SPACE_HELD_MAX and not self._open:
            self._flush_markup(Text)

    def turn(self, wire: str) -> None:
        """A marker between reasoning and text; the white space around it is markup."""
        self._drop_space()
        self._markup += wire
        self._trims, self._loose = True, False

    def begin(self, name: str, wire: str, call_id: str = "") -> None:
        """A call begins."""
        assert not self._open, "a call begins inside another"
        self._drop_space()
        self._index += 1
        self._open, self._trims = True, False
        identifier = call_id or self._call_id(self._index)
        self._events.append(CallBegin(self._index, name, identifier, self._take_markup() + wire))

    def arguments(self, text: str, wire: str) -> None:
        """More arguments of the open call."""
        assert self._open, "arguments belong to a call"
        self._markup += wire
        if text or len(self._markup) > SPACE_HELD_MAX:
            self._events.append(CallArguments(self._index, text, self._take_markup()))

    def end(self, outcome: Outcome, wire: str = "") -> None:
        """The open call ends."""
        assert self._open, "a call ends that did not begin"
        self._open, self._after_call = False, True
        self._events.append(CallEnd(self._index, outcome, self._take_markup() + wire))

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._open

    def interrupt(self) -> None:
        """The answer was cut off: held text is discarded."""
        if self._open:
            self.end(Outcome.CUT)

    def finish(self) -> None:
        """The answer is over."""
        self.interrupt()
        if self._after_call:
            self._drop_space()
        self._settle_space()
        if self._markup:
            self._flush_markup(Text)
