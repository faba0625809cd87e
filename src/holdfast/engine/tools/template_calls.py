"""The machine of a checkpoint's response template.

It looks for all borders that may come next at once; text before the earliest place at which one may still
begin is passed on. Regions of text and reasoning are streamed. A region of calls is read when it is complete,
so its calls arrive whole; one that cannot be read is text. Special tokens must be part of the text.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from holdfast.engine.tools.emitter import Emitter
from holdfast.engine.tools.events import Outcome
from holdfast.engine.tools.formats import OWN_FORMAT, CallFormat
from holdfast.engine.tools.machine import HELD_MAX, OfferedTools
from holdfast.engine.tools.markers import MarkerLexer
from holdfast.engine.tools.patterns import Match, Pattern, Search
from holdfast.engine.tools.response_template import Field, Part, ResponseTemplate
from holdfast.engine.tools.template_values import calls_of

SLICE = 64
"""Text is searched in slices, so that what lies after a border is searched twice at most."""
REGION_MAX = 1 << 20
"""Longest region of calls; a longer one is text."""


def template_format(template: ResponseTemplate, prompt: str) -> CallFormat:
    """The format of one answer: the prompt may have begun it."""
    build = partial(TemplateCalls, template, template.begun_in(prompt))
    return replace(OWN_FORMAT, build=build, reasoning_end=template.reasoning_end)


class TemplateCalls:
    """Reads one answer that follows a response template, of which `begun` is already in the prompt."""

    def __init__(
        self,
        template: ResponseTemplate,
        begun: str,
        emitter: Emitter,
        lexer: MarkerLexer,
        offered: OfferedTools | None,
    ) -> None:
        self._template = template
        self._emitter = Emitter(lambda _: "")
        self._lexer = lexer
        self._offered = offered
        self._region: Field | None = template.implicit
        self._groups: dict[str, str] = {}
        self._body: list[str] = []
        """The text of a region of calls, with its opening first."""
        self._body_size = 0
        self._text = ""
        self._base = 0
        self._searches: list[tuple[Field, Search]] = []
        self._watch()
        self.feed(begun)
        self._emitter = emitter
        self._text = ""
        self._watch()
        if self._part is Part.REASONING:
            emitter.turn("")

    @property
    def idle(self) -> bool:
        """Whether no region of calls is open."""
        return self._part is not Part.CALLS

    @property
    def settled(self) -> bool:
        """Whether no region of calls is open."""
        return self._part is not Part.CALLS

    @property
    def reasons(self) -> bool:
        """Whether a region of reasoning is open."""
        return self._part is Part.REASONING

    def release(self) -> None:
        """Nothing is released before the answer is over."""

    @property
    def _is_implicit(self) -> bool:
        return self._region is None or self._region.opens is None

    @property
    def _part(self) -> Part:
        return Part.TEXT if self._region is None else self._region.part

    def _watch(self) -> None:
        """Begin to look for the borders that may come next."""
        self._base = 0
        if self._is_implicit:
            patterns = [(field, field.opens) for field in self._template.fields]
            patterns += [(self._region, self._region.closes)] if self._region is not None else []
        else:
            assert self._region is not None
            patterns = [(self._region, self._region.closes)]
        self._searches = [(field, Search(each)) for field, each in patterns if isinstance(each, Pattern)]

    def feed(self, chunk: str) -> None:
        """Read more of the answer."""
        for place in range(0, len(chunk), SLICE):
            self._read(chunk[place : place + SLICE])

    def _read(self, text: str) -> None:
        rest: str | None = text
        while rest:
            self._text += rest
            for _, search in self._searches:
                search.feed(rest)
            rest = self._settle(at_end=False)

    def _settle(self, *, at_end: bool) -> str | None:
        """Act on the first border, if one is certain; returns the text after it, to be read again."""
        chosen: tuple[Field, Match] | None = None
        held = self._base + len(self._text)
        for field, search in self._searches:
            found = search.match(self._text, self._base)
            if found is None:
                held = held if at_end else min(held, search.pending)
            elif chosen is None or (found.start, -found.end) < (chosen[1].start, -chosen[1].end):
                chosen = field, found
        if chosen is None or (chosen[1].start >= held and not at_end):
            self._pass(held)
            return self._give_up() if self._body_size > REGION_MAX else None
        field, found = chosen
        self._pass(found.start)
        size = found.end - self._base
        border, rest = self._text[:size], self._text[size:]
        self._text = ""
        self._cross(field, found, border)
        self._watch()
        return rest

    def _pass(self, place: int) -> None:
        """Text before `place` has no border; what is held after it is bounded."""
        size = place - self._base
        if len(self._text) - size > HELD_MAX:
            self._say(self._text)
            self._text = ""
            self._watch()
        elif size:
            self._say(self._text[:size])
            self._text = self._text[size:]
            self._base += size

    def _say(self, text: str) -> None:
        """Text of the region."""
        if self._part is Part.CALLS:
            self._body.append(text)
            self._body_size += len(text)
        elif self._region is None:
            self._emitter.markup(text)
        elif self._part is Part.REASONING:
            self._emitter.reasoning(text)
        else:
            self._emitter.text(text)

    def _cross(self, field: Field, found: Match, border: str) -> None:
        """A region opens or closes."""
        if self._is_implicit and field is not self._region:
            self._region, self._groups = field, found.groups
            if field.part is Part.CALLS:
                self._body, self._body_size = [border], 0
            else:
                self._emitter.turn(border)
            return
        if self._part is Part.CALLS and not self._is_implicit:
            self._close_calls({**self._groups, **found.groups}, border)
        else:
            self._emitter.turn(border)
        if not self._is_implicit:
            self._region = self._template.implicit

    def _close_calls(self, groups: dict[str, str], border: str) -> None:
        """The region of calls is complete."""
        assert self._region is not None
        wire = "".join(self._body) + border
        body = "".join(self._body[1:])
        self._body, self._body_size = [], 0
        try:
            calls = calls_of(self._region, body, groups, self._offered)
        except ValueError:
            self._emitter.text(wire)
            return
        for call in calls:
            self._emitter.begin(call.name, wire, call.id)
            self._emitter.arguments(call.arguments, "")
            self._emitter.end(Outcome.COMPLETE)
            wire = ""

    def _give_up(self) -> str:
        """A region of calls is too long: it is text. Returns what is to be read again."""
        self._emitter.text("".join(self._body))
        rest, self._text = self._text, ""
        self._body, self._body_size = [], 0
        self._region = self._template.implicit
        self._watch()
        return rest

    def finish(self) -> None:
        """The answer is over: what is complete is read, the rest is text."""
        rest: str | None = ""
        while rest is not None:
            self._read(rest)
            for _, search in self._searches:
                search.finish()
            rest = self._settle(at_end=True)
        if self._part is Part.CALLS:
            self._close_calls(self._groups, "")
