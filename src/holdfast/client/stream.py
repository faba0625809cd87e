"""Reading a turn's stream without I/O: bytes to events, events to text.

`EventDecoder` parses `text/event-stream` from chunks of any size; only a newline ends a line, because text
may hold other characters that Python treats as line ends. It is our own because the decoders of httpx-sse are
private and tied to one response (docs/decisions/0019). `TurnReader` turns the events of one turn into new
text, also after a reconnect, when the stream starts again from its beginning. Used by both clients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from holdfast.client.errors import AnswerChanged, ProtocolError, error_from_body
from holdfast.client.values import TurnResult

__all__ = ["Event", "EventDecoder", "TurnReader"]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream."""

    name: str
    text: str

    def body(self) -> dict[str, Any]:
        """The JSON object that the event carries."""
        try:
            body = json.loads(self.text)
        except ValueError as error:
            raise ProtocolError(f"the event {self.name!r} carries no JSON") from error
        if not isinstance(body, dict):
            raise ProtocolError(f"the event {self.name!r} carries no JSON object")
        return body


class EventDecoder:
    """Bytes in, whole events out."""

    __slots__ = ("_data", "_name", "_rest")

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """The unfinished last line."""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that are whole with this chunk."""
        self._rest.append(chunk)
        if b"\n" not in chunk:
            return
        *lines, rest = b"".join(self._rest).split(b"\n")
        self._rest = [rest]
        for line in lines:
            event = self._take(line.removesuffix(b"\r").decode(errors="replace"))
            if event is not None:
                yield event

    def _take(self, line: str) -> Event | None:
        if not line:
            event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
            self._name, self._data = "", []
            return event
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)
        return None


class TurnReader:
    """The text and tokens of one turn that its caller has got.

    `shown` is the text handed out, `tokens_shown` how many tokens it took. A stream that is opened again is
    read from its beginning: what was shown is skipped, and must be the same. A turn may be over at the server
    before its words are read: `cut` then shortens its result to what an interruption has kept.
    """

    __slots__ = ("_again", "_at_text", "_at_tokens", "_kept", "_marks", "result", "shown", "token_ids")

    def __init__(self) -> None:
        self.shown = ""
        self.token_ids: list[int] = []
        self.result: TurnResult | None = None
        self._again = False
        self._at_text = 0
        self._at_tokens = 0
        self._kept: int | None = None
        self._marks = [(0, 0)]
        """How much text had been said with so many tokens."""

    @property
    def tokens_shown(self) -> int:
        """How many generated tokens were handed out."""
        return len(self.token_ids)

    def reopen(self) -> None:
        """A new stream of the same turn begins."""
        self._again = True
        self._at_text = self._at_tokens = 0

    def hear(self, event: Event) -> str:
        """The new text of an event; raises what the server says went wrong."""
        if event.name == "delta":
            body = event.body()
            return self._advance(
                str(body.get("text", "")), [int(token) for token in body.get("token_ids", ())]
            )
        if event.name == "done":
            return self.settle(TurnResult.from_body(event.body()))
        if event.name == "error":
            raise error_from_body(event.body().get("error") or {})
        return ""

    def cut(self, kept: int) -> None:
        """An interruption has kept so many tokens of the turn."""
        self._kept = kept
        if self.result is not None:
            self.result = self._shortened(self.result)

    def settle(self, result: TurnResult) -> str:
        """The turn has ended so; what the deltas have not said of its text is new."""
        if self._kept is not None and self._kept < len(result.token_ids):
            self.result = self._shortened(result)
            return ""
        self.result = result
        if result.text.startswith(self.shown):
            rest = result.text[len(self.shown) :]
            self.shown = result.text
            self.token_ids = list(result.token_ids)
            return rest
        if self._again and not self.shown.startswith(result.text):
            raise AnswerChanged("the turn was retried and its text differs from what was shown")
        return ""

    def _advance(self, text: str, tokens: list[int]) -> str:
        before = self.shown[self._at_text : self._at_text + len(text)]
        if not text.startswith(before):
            raise AnswerChanged("the turn was retried and its text differs from what was shown")
        new = text[len(before) :]
        self.shown += new
        self.token_ids += tokens[max(0, len(self.token_ids) - self._at_tokens) :]
        self._at_text += len(text)
        self._at_tokens += len(tokens)
        self._marks.append((len(self.token_ids), len(self.shown)))
        return new

    def _shortened(self, result: TurnResult) -> TurnResult:
        """The result without the tokens past those kept, and with the text that was said by then."""
        kept = self._kept
        if kept is None or kept >= len(result.token_ids):
            return result
        characters = max(said for tokens, said in self._marks if tokens <= kept)
        return replace(
            result,
            text=result.text[:characters],
            token_ids=result.token_ids[:kept],
            finish_reason="abort",
            usage=replace(result.usage, completion_tokens=kept),
        )
