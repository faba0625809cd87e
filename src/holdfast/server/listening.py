"""Listening ahead: clients' input is computed before it is complete.

A route passes the growing input of a session's next turn to `Listening` (`hear`). It is written for the
session's history like any turn, and the engine computes the part that more text will not change
(`engine/turns/listening.py`). The turn itself is started as always: the engine computes only the rest. No
result depends on this module: an input that cannot be written yet is left to its turn.

Inputs are written one at a time for each session, the newest only, after a short delay in which the turn may
arrive, so that input sent at once has no extra cost. While a turn runs on the session the input waits for
its end. Inputs of HTTP clients are also kept here (`Said`), for `SAID_SECONDS`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.core.listening import common
from holdfast.engine.sampling import Sampling
from holdfast.engine.turns.listening import settled
from holdfast.server.dialects.answer_options import AnswerOptions
from holdfast.server.dialects.turn_options import TurnOptions
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.engine_client import Link
from holdfast.server.prompts import opens_history
from holdfast.server.sessions import SessionRecord, engine_name
from holdfast.server.turn_request import PLAIN_ANSWER, Input, TurnAsked
from holdfast.server.turn_writer import TurnWriter

__all__ = ["Listening", "Said"]

log = logging.getLogger("holdfast.server")

MOMENT_SECONDS = 0.01
"""How long to wait for the turn before its input is written ahead."""

SAID_SECONDS = 60.0
"""How long input that came over HTTP is kept without a turn."""

OFTEN_CHARACTERS = 4096
"""Longer inputs are written again only when they have grown by an eighth."""

LATER = ("session_busy", "history_changed")
"""Refusals of the engine after which the input is written again when a turn has ended."""


@dataclass(slots=True)
class Said:
    """Input that came over HTTP: the text so far, and the turn that took it."""

    text: str = ""
    taken_by: str | None = None
    heard: float = 0.0


class _Speaker:
    """The incoming input of one session."""

    __slots__ = ("answer", "record", "said", "task", "written")

    def __init__(self, record: SessionRecord, answer: AnswerOptions) -> None:
        self.record = record
        self.answer = answer
        self.said: Input | None = None
        self.written: Input | None = None
        self.task: asyncio.Task[None] | None = None


class Writes(Protocol):
    """What writes turns; raises a `Problem` while no model is loaded."""

    def __call__(self) -> TurnWriter:
        """The writer of the served model."""


class Listening:
    """The inputs of all sessions that are not complete yet."""

    def __init__(self, link: Link, writer: Writes, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._writer = writer
        self._clock = clock
        self._speakers: dict[str, _Speaker] = {}
        self._said: dict[str, Said] = {}

    def __len__(self) -> int:
        return len(self._speakers)

    # --- input ------------------------------------------------------------------------------------

    def hear(self, record: SessionRecord, said: Input | None, answer: AnswerOptions = PLAIN_ANSWER) -> None:
        """The input of a session's next turn is `said` so far; None takes it back.

        `answer` has the tools of a first turn, which are described before its input.
        """
        key = engine_name(record.tenant, record.name)
        speaker = self._speakers.get(key)
        if said is None:
            self._forget(key)
            if speaker is not None and speaker.written is not None:
                self._link.send(wire.Hear(self._link.number(), key, [], None))
            return
        if speaker is None or speaker.record is not record:
            self._forget(key)
            speaker = self._speakers[key] = _Speaker(record, answer)
            self.expect(record)
        speaker.said = said
        self._wake(key, speaker)

    def expect(self, record: SessionRecord) -> None:
        """A turn of a session is expected: its memory comes back if it is away and there is room."""
        key = engine_name(record.tenant, record.name)
        self._link.send(wire.Hear(self._link.number(), key, [], None, soon=True))

    def begun(self, record: SessionRecord) -> None:
        """A turn is about to start: from now on its input is the engine's."""
        self._forget(engine_name(record.tenant, record.name))

    def turn_ended(self, key: str) -> None:
        """A turn has ended on a session: input that arrived meanwhile can be written now."""
        speaker = self._speakers.get(key)
        if speaker is not None:
            self._wake(key, speaker)

    def gone(self, key: str) -> None:
        """A session has ended."""
        self._forget(key)
        self._said.pop(key, None)

    def clear(self) -> None:
        """The engine has lost everything that it had computed."""
        for speaker in self._speakers.values():
            speaker.written = None

    def _forget(self, key: str) -> None:
        speaker = self._speakers.pop(key, None)
        if speaker is not None:
            speaker.said = None

    # --- writing ----------------------------------------------------------------------------------

    def _wake(self, key: str, speaker: _Speaker) -> None:
        if speaker.task is None:
            speaker.task = asyncio.create_task(self._write(key, speaker))

    async def _write(self, key: str, speaker: _Speaker) -> None:
        """Write the input until there is nothing new; problems are left to the turn."""
        try:
            await asyncio.sleep(MOMENT_SECONDS)
            while (said := speaker.said) is not None and _is_news(said, speaker.written):
                known = speaker.record.view.known
                tokens = await self._ahead(speaker, said)
                if speaker.said is None or not tokens:
                    return
                speaker.written = said
                number = self._link.number()
                await self._link.call(wire.Hear(number, key, tokens, known), number)
        except Problem as problem:
            if problem.code in LATER:
                speaker.written = None
            log.debug("not computed ahead: %s", problem.code)
        except Exception as error:
            log.error("an input could not be computed ahead", exc_info=error)
        finally:
            speaker.task = None

    async def _ahead(self, speaker: _Speaker, said: Input) -> list[int]:
        """The tokens of an input that more of it will not change."""
        part = _begun(said)
        if part is None or (speaker.record.view.known and opens_history(said.messages or [])):
            return []
        whole = await self._tokens(speaker, said)
        if part is said:
            return whole
        begun = await self._tokens(speaker, part)
        return whole[: common(tuple(whole), tuple(begun))]

    async def _tokens(self, speaker: _Speaker, said: Input) -> list[int]:
        asked = TurnAsked(said, Sampling(), "", TurnOptions(append_history=True), speaker.answer)
        return (await self._writer().write(asked, speaker.record, speaker.record.tenant)).tokens

    # --- input over HTTP --------------------------------------------------------------------------

    def said(self, record: SessionRecord) -> Said:
        """The waiting HTTP input of a session; a new text once a turn has begun."""
        key = engine_name(record.tenant, record.name)
        now = self._clock()
        found = self._said.pop(key, None)
        # The oldest come first, so that an append costs the same among many sessions.
        while self._said and now - next(iter(self._said.values())).heard > SAID_SECONDS:
            del self._said[next(iter(self._said))]
        if found is None or found.taken_by is not None or now - found.heard > SAID_SECONDS:
            found = Said()
        self._said[key] = found
        found.heard = now
        return found

    def take(self, record: SessionRecord, turn: str) -> str:
        """The text that was said, for a turn; the same once more if the turn is repeated. Empty without."""
        found = self._said.get(engine_name(record.tenant, record.name))
        if found is None or found.taken_by not in (None, turn) or self._clock() - found.heard > SAID_SECONDS:
            return ""
        found.taken_by = turn
        return found.text


def _is_news(said: Input, written: Input | None) -> bool:
    """Whether an input is to be written again."""
    if written is None or said is written:
        return written is None
    before, now = _length(written), _length(said)
    return now < OFTEN_CHARACTERS or not before <= now < before + before // 8


def _length(said: Input) -> int:
    texts = [said.text or "", *(str(message.get("content") or "") for message in said.messages or [])]
    return sum(map(len, texts)) + len(said.tokens or [])


def _begun(said: Input) -> Input | None:
    """An input without its last word; tokens are final as they are. None if nothing is left."""
    if said.text is not None:
        text = settled(said.text)
        return replace(said, text=text) if text else None
    if not said.messages:
        return said if said.tokens else None
    last: dict[str, Any] = said.messages[-1]
    text = settled(str(last.get("content") or ""))
    if text:
        return replace(said, messages=[*said.messages[:-1], {**last, "content": text}])
    return replace(said, messages=said.messages[:-1]) if len(said.messages) > 1 else None
