"""The Holdfast session behind a connection: opened with its first response, and brought to the client's list.

The session's first turn has the instructions and the tools. Later instructions are appended as a system
message, which keeps the computed memory. If the chat template allows no system message there, or if tools
change, the session is rewound to its beginning and the conversation sent again. System items in the middle
become user messages for such a template. A lost or expired session is opened again in the same way, unless
the client named it. If a client resends its history to a session that it named, only the new items are
appended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.server.dialects.turn_options import TurnOptions
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.routes.realtime_openai.history import Cut, Turn, plan
from holdfast.server.routes.realtime_openai.items import Item, chat_messages
from holdfast.server.routes.realtime_openai.settings import AnswerSettings
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord
from holdfast.server.turn_request import Input, TurnAsked

__all__ = ["Asked", "Talk", "apart"]

SYSTEM_ROLES = ("system", "developer")
GONE = ("session_not_found", "session_expired", "session_lost")
FIELDS = {
    "max_tokens": "max_output_tokens",
    "messages": "conversation",
    "input": "conversation",
    "chat_template_kwargs": "reasoning.effort",
}
"""What OpenAI's clients call the fields of a turn."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A response to make: its name, the session's settings, and those of this response."""

    name: str
    session: AnswerSettings
    answer: AnswerSettings

    @property
    def extra(self) -> str:
        """The response's instructions beyond the session's; empty if it has none of its own."""
        own, all_of_it = self.session.instructions, self.answer.instructions
        if own and all_of_it.startswith(own):
            return all_of_it.removeprefix(own).lstrip("\n")
        return "" if own == all_of_it else all_of_it


class Talk:
    """One session, and the turns that this connection has taken on it."""

    def __init__(self, service: Service, caller: Caller, name: str, *, stays: bool) -> None:
        """`stays`: the client named the session, and it stays open when the connection ends."""
        self.service = service
        self.caller = caller
        self.name = name
        self.stays = stays
        self.turns: list[Turn] = []
        self._before = 0
        """Turns that the session had when this connection came."""
        self._opened = False
        self._spoke = False
        """Whether it has had a turn of this connection."""
        self._takes_notes = True
        """Whether the chat template takes a system message in the middle, as far as is known."""
        self._opening = asyncio.Lock()

    # --- the session ------------------------------------------------------------------------------

    async def record(self) -> SessionRecord:
        """The session; opened if it is not open yet, and again if it was lost."""
        async with self._opening:
            return await self._record()

    async def _record(self) -> SessionRecord:
        tenant = self.caller.tenant
        if not self._opened:
            record = await self.service.sessions.known(tenant, self.name) if self.stays else None
            if record is None:
                record = await self.service.sessions.open(self.caller, self.name)
            else:
                self.service.listening.expect(record)
            self._opened = True
            self._before = record.view.turns
            return record
        try:
            return await self.service.sessions.find(tenant, self.name)
        except Problem as problem:
            if self.stays or problem.code not in GONE:
                raise
        self.turns.clear()
        return await self.service.sessions.open(self.caller, self.name)

    async def close(self) -> None:
        """The connection has ended."""
        if self._opened and not self.stays:
            await self.service.sessions.close(self.caller, self.name)

    @property
    def _may_begin_again(self) -> bool:
        return self._before == 0

    async def _keep(self, record: SessionRecord, turns: int) -> None:
        """Rewind so that so many turns of this connection remain."""
        if turns < len(self.turns):
            await self.service.sessions.rewind(record, self._before + turns)
            del self.turns[turns:]

    async def cut(self, cut: Cut) -> None:
        """Cut the last turn, which has ended."""
        await self.service.sessions.interrupt(await self.record(), cut.turn.name, cut.tokens)
        self.was_cut(cut)

    def was_cut(self, cut: Cut) -> None:
        """The session has the turn as it was cut."""
        *same, text = cut.turn.answer[-1]
        cut.item.texts = (text[: cut.characters],)
        cut.turn.answer[-1] = (*same, cut.item.text)

    # --- turns ------------------------------------------------------------------------------------

    async def listen(self, items: Sequence[Item], asked: Asked) -> None:
        """Have the input of a response that may come computed ahead, if the session goes on with it."""
        record = await self.record()
        if record.view.turns != self._before + len(self.turns) or self._must_begin_again(record, asked):
            return
        made = plan(self.turns, items)
        if made.turns < len(self.turns) or made.cut is not None or not made.rest or self._resent(made.rest):
            return
        anew = not self.turns and self._may_begin_again
        answer = asked.answer.options(callable_tools=asked.answer.tools != () or not record.tools)
        self.service.listening.hear(
            record, Input(messages=self._messages(made.rest, asked, anew=anew)), answer
        )

    def unheard(self) -> None:
        """The pending input is discarded."""
        record = self.service.table.get(self.caller.tenant, self.name)
        if record is not None and self._opened:
            self.service.listening.hear(record, None)

    async def start(self, items: Sequence[Item], asked: Asked) -> tuple[TurnFeed, Turn]:
        """Start a turn that answers these items."""
        record = await self.record()
        if record.view.turns != self._before + len(self.turns):
            said = "the session was changed by another client; connect again to go on with it"
            raise Problem(409, "history_changed", said)
        made = plan([] if self._must_begin_again(record, asked) else self.turns, items)
        await self._keep(record, made.turns)
        if made.cut is not None:
            await self.cut(made.cut)
        try:
            return await self._start(record, made.rest, asked)
        except Problem as problem:
            learns = self._takes_notes and problem.code == "chat_template" and self._notes(made.rest, asked)
            again = bool(self.turns) and self._may_begin_again and _refused_by_template(problem)
            if not learns and not again:
                raise
        self._takes_notes = self._takes_notes and not learns
        if self.turns and (not learns or self._must_begin_again(record, asked)):
            made = plan([], items)
            await self._keep(record, 0)
        return await self._start(record, made.rest, asked)

    async def steer(
        self, before: Turn, keep: int, items: Sequence[Item], asked: Asked
    ) -> tuple[TurnFeed, Turn]:
        """Start a turn that cuts the one that is being cancelled after `keep` tokens, and answers `items`."""
        record = await self.record()
        known = record.view.turns - self._before - len(self.turns)
        if self.turns[-1:] != [before] or known not in (-1, 0) or self._must_begin_again(record, asked):
            raise Problem(409, "history_changed", "the response before cannot be steered")
        return await self._start(record, list(items), asked, steers=keep)

    def _resent(self, items: Sequence[Item]) -> bool:
        """Whether the first items of a connection bring the history that its session has: answers among them.
        They are compared with it, and what is new is appended."""
        return (
            not self.turns
            and not self._may_begin_again
            and any(message["role"] == "assistant" for message in chat_messages(items))
        )

    def _must_begin_again(self, record: SessionRecord, asked: Asked) -> bool:
        """Whether the history cannot be continued: other tools, or instructions that it cannot take."""
        if not self.turns or not self._may_begin_again:
            return False
        tools = list(asked.answer.tools or ())
        return (bool(tools) and tools != record.tools) or (not self._takes_notes and self._differs(asked))

    def _differs(self, asked: Asked) -> bool:
        """Whether a later turn needs instructions that the history does not have."""
        return bool(asked.extra or asked.session.instructions != self.turns[-1].instructions)

    def _notes(self, items: Sequence[Item], asked: Asked) -> bool:
        """Whether a turn has a system message that is not the first of the conversation."""
        anew = not self.turns and self._may_begin_again
        messages = self._messages(items, asked, anew=anew)[1 if anew else 0 :]
        return any(message["role"] in SYSTEM_ROLES for message in messages)

    async def _start(
        self, record: SessionRecord, items: list[Item], asked: Asked, steers: int | None = None
    ) -> tuple[TurnFeed, Turn]:
        resent = self._resent(items)
        anew = not self.turns and self._may_begin_again
        if anew and self._spoke:
            record.tools = []  # Those of the first turn that was rewound; the next one says which there are.
        tools = asked.answer.tools
        turn = TurnAsked(
            Input(messages=self._messages(items, asked, anew=anew or resent)),
            asked.answer.sampling(self.service.facts.context_length),
            asked.name,
            TurnOptions(append_history=not resent),
            asked.answer.options(callable_tools=tools != () or not record.tools),
            cut=True,
            fields=FIELDS,
            steers=steers,
        )
        self.service.check_turn(turn)
        feed = await self.service.start_turn(record, turn)
        instructions = asked.session.instructions if self._takes_notes else asked.answer.instructions
        made = Turn(asked.name, [item.said for item in items], instructions)
        self.turns.append(made)
        self._spoke = True
        return feed, made

    def _messages(self, items: Sequence[Item], asked: Asked, *, anew: bool) -> list[dict[str, Any]]:
        """The messages of a turn. Results of calls follow the calls; other instructions come after them."""
        messages = chat_messages(items)
        own, extra = asked.session.instructions, asked.extra
        if anew and (not messages or not self._takes_notes):
            first = _system(asked.answer.instructions or own)
            return first + self._fitted(messages, after=len(first))
        if anew:
            return [*_system(own), *messages, *_system(extra)]
        known = self.turns[-1].instructions if self.turns else ""
        results = next(
            (place for place, message in enumerate(messages) if message["role"] != "tool"), len(messages)
        )
        note = _system(own) if own != known else []
        made = [*messages[:results], *note, *messages[results:], *_system(extra)]
        return self._fitted(made, after=1)

    def _fitted(self, messages: list[dict[str, Any]], after: int) -> list[dict[str, Any]]:
        """Messages after some others; a template that takes no system message there gets the user's."""
        if self._takes_notes:
            return messages
        return [
            {**message, "role": "user"} if message["role"] in SYSTEM_ROLES and after + place else message
            for place, message in enumerate(messages)
        ]

    def ended(self, turn: Turn, *, kept: bool, answer: Sequence[Item]) -> None:
        """A turn has ended; a turn that was rolled back does not count."""
        if not kept:
            self.turns.remove(turn)
            return
        turn.answer = [item.said for item in answer]


def apart(items: Sequence[Item], asked: Asked, context_length: int) -> TurnAsked:
    """A response outside of the conversation: a request of its own."""
    return TurnAsked(
        Input(messages=[*_system(asked.answer.instructions), *chat_messages(items)]),
        asked.answer.sampling(context_length),
        asked.name,
        TurnOptions(),
        asked.answer.options(callable_tools=True),
        cut=True,
        fields=FIELDS,
    )


def _system(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


def _refused_by_template(problem: Problem) -> bool:
    """Whether messages cannot follow the history, although they might as a whole conversation."""
    return problem.code == "chat_template" or (problem.param or "").startswith("conversation[")
