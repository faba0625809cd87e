"""The client for ordinary code: sessions and turns of a server, call by call.

    with Client("http://127.0.0.1:8000") as client:
        with client.session(system="You are terse.") as session:
            for piece in session.say("Name three rivers."):
                print(piece, end="")

A client may be used from several threads: one can interrupt the turn that another one reads. Calls are sent
again by themselves when the connection fails or the server asks for patience (see `retry`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Unpack

import httpx

from holdfast.client import calls
from holdfast.client.calls import Call
from holdfast.client.dialogue import Dialogue
from holdfast.client.errors import (
    ConnectionFailed,
    HoldfastError,
    NotFound,
    Unavailable,
    error_from_response,
    lost_connection,
)
from holdfast.client.realtime import Realtime
from holdfast.client.retry import Attempts, Retries
from holdfast.client.stream import EventDecoder, TurnReader
from holdfast.client.values import (
    Body,
    Generated,
    Keep,
    Said,
    Sampling,
    SessionView,
    Timing,
    TurnResult,
    Usage,
)

__all__ = ["Client", "Session", "Transport", "Turn"]


class Transport:
    """Sends calls, again where that helps, and turns answers into values or exceptions."""

    def __init__(self, url: str, api_key: str | None, retries: Retries, timeout: float) -> None:
        self.url = calls.base_url(url)
        self.retries = retries
        self.headers = {"authorization": f"Bearer {api_key}"} if api_key is not None else {}
        # Every session may have a turn in flight: the number of connections is the server's to limit.
        self.http = httpx.Client(
            base_url=self.url,
            headers=self.headers,
            timeout=httpx.Timeout(timeout, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    def ask(self, call: Call) -> Body:
        """The answer to a call, as a JSON object."""
        body = self.read(call)
        return {} if body is None else calls.parse_answer(body)

    def read(self, call: Call) -> bytes | None:
        """The answer to a call; None if it was lost on the way, though the call has been carried out."""
        attempts = Attempts(self.retries)
        while True:
            try:
                response = self.open(call)
                try:
                    return response.read()
                except httpx.TransportError as error:
                    raise lost_connection(self.url, error) from error
                finally:
                    response.close()
            except HoldfastError as error:
                if attempts.carried_out(error, call.carried_out):
                    return None
                time.sleep(attempts.after(error))

    def open(self, call: Call) -> httpx.Response:
        """One attempt: a response whose status is good and whose body is still to be read."""
        request = self.http.build_request(call.method, call.path, json=call.body)
        try:
            response = self.http.send(request, stream=True)
            if response.is_success:
                return response
            try:
                raise error_from_response(response.status_code, response.read(), response.headers)
            finally:
                response.close()
        except httpx.TransportError as error:
            raise lost_connection(self.url, error) from error


class Turn:
    """A turn: an iterator of text as it comes, and the result once it is done.

    Leaving one before its end (`close`, or the end of a `with` block) ends it at the server as `on_abort` of
    `say` asked for.
    """

    def __init__(self, transport: Transport, call: Call) -> None:
        assert call.body is not None
        self.id: str = call.body["turn_id"]
        self._transport = transport
        self._call = call
        self._attempts = Attempts(transport.retries)
        self._reader = TurnReader()
        self._response: httpx.Response | None = None
        self._left = False
        self._pieces = self._read()
        self._connect()

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop listening; a turn that was not done is ended at the server."""
        self._left = True
        if self._response is not None:
            self._response.close()

    def wait(self) -> TurnResult:
        """Read the turn to its end."""
        for _ in self:
            continue
        if self._reader.result is None:
            raise ConnectionFailed("the turn was left before its end")
        return self._reader.result

    def cut(self, kept: int) -> None:
        """The server has kept so many tokens of the turn; called by `Session.interrupt`."""
        self._reader.cut(kept)

    @property
    def done(self) -> bool:
        """Whether the turn has had its end, as far as it was read."""
        return self._reader.result is not None

    @property
    def tokens_shown(self) -> int:
        """How many generated tokens were handed out."""
        return self._reader.tokens_shown

    @property
    def text(self) -> str:
        """Everything the turn says, of one that was cut short what stands; waits for its end."""
        return self.wait().text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens that stand; waits for the end."""
        return self.wait().token_ids

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `abort`; waits for the end."""
        return self.wait().finish_reason

    @property
    def usage(self) -> Usage:
        """What the turn cost; waits for the end."""
        return self.wait().usage

    @property
    def timing(self) -> Timing:
        """How long the turn took at the server; waits for the end."""
        return self.wait().timing

    def _connect(self) -> None:
        while True:
            try:
                self._response = self._transport.open(self._call)
                return
            except HoldfastError as error:
                time.sleep(self._attempts.after(error))

    def _read(self) -> Iterator[str]:
        """The pieces, over as many connections as it takes."""
        while self._reader.result is None and not self._left:
            try:
                yield from self._read_connection()
            except (ConnectionFailed, Unavailable) as error:
                if self._left:
                    return
                time.sleep(self._attempts.after(error))
                self._reader.reopen()
                self._connect()

    def _read_connection(self) -> Iterator[str]:
        assert self._response is not None
        decoder = EventDecoder()
        try:
            for chunk in self._response.iter_bytes():
                for event in decoder.feed(chunk):
                    if text := self._reader.hear(event):
                        self._attempts.progress()
                        yield text
        except (httpx.TransportError, httpx.StreamError) as error:
            raise lost_connection(self._transport.url, error) from error
        finally:
            self._response.close()
        if self._reader.result is None:
            raise ConnectionFailed(f"{self._transport.url}: the stream ended before the turn did")


class Session:
    """A conversation whose memory stays at the server between turns."""

    def __init__(self, transport: Transport, session_id: str, system: str | None = None) -> None:
        self._transport = transport
        self.id = session_id
        self.system = system
        self._current: Turn | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(
        self,
        said: Said,
        *,
        turn_id: str | None = None,
        on_abort: Literal["rollback", "keep"] = "rollback",
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Turn:
        """Say something and get a turn: iterate over it for text as it comes, or ask for its `text`."""
        call = calls.start_turn(self.id, said, sampling, turn_id=turn_id, on_abort=on_abort, timeout=timeout)
        self._current = Turn(self._transport, call)
        return self._current

    def interrupt(self, keep: Keep = "heard") -> None:
        """Cut into the turn in flight, or into the last one if no other has begun.

        Tokens that stay: a number, those that were handed out so far (`"heard"`), `"all"`, or `"none"` (then
        the turn never was).
        """
        current = self._current
        heard = None if current is None else current.tokens_shown
        turn_id = None if current is None else current.id
        call = calls.interrupt_session(self.id, turn_id, keep, heard)
        self._transport.ask(call)
        if current is not None and call.body is not None and call.body.get("keep") != "all":
            current.cut(call.body.get("keep_tokens", 0))

    def rewind(self, turns: int) -> SessionView:
        """Go back so that only the first `turns` turns remain."""
        self._current = None
        return self._changed(calls.rewind_session(self.id, turns))

    def fork(self, at_turn: int | None = None, id: str | None = None) -> Session:  # noqa: A002
        """A second session that goes on from here, or from the end of an earlier turn; memory is shared."""
        call = calls.fork_session(self.id, id, at_turn)
        assert call.body is not None
        self._transport.ask(call)
        return Session(self._transport, call.body["id"], self.system)

    def spill(self, tier: Literal["host", "disk"] | None = None) -> SessionView:
        """Move the session's memory off the device, to the nearest tier with room if none is named."""
        return self._changed(calls.spill_session(self.id, tier))

    def restore(self) -> SessionView:
        """Bring the session's memory back to the device."""
        return self._changed(calls.restore_session(self.id))

    def _changed(self, call: Call) -> SessionView:
        """Send a call that is answered with the session as it is then."""
        body = self._transport.ask(call)
        return SessionView.from_body(body) if body else self.view()

    def view(self) -> SessionView:
        """The session as the server describes it now."""
        return SessionView.from_body(self._transport.ask(calls.show_session(self.id)))

    @property
    def turns(self) -> int:
        """How many turns the conversation has."""
        return self.view().turns

    def realtime(self, resume_after: int | None = None) -> Realtime:
        """Full duplex over a WebSocket: say more while the model speaks.

        `resume_after` is the number of the last event that was heard of this session, elsewhere or earlier.
        """
        transport = self._transport
        return Realtime(transport.url, transport.headers, Dialogue(self.id, resume_after), transport.retries)

    def close(self) -> None:
        """End the conversation and give its memory back. Closing twice is no error."""
        if self._current is not None:
            self._current.close()
        try:
            self._transport.ask(calls.close_session(self.id))
        except NotFound:
            self._current = None


class Client:
    """A Holdfast server."""

    def __init__(
        self,
        url: str = calls.DEFAULT_URL,
        api_key: str | None = None,
        *,
        retries: Retries | None = None,
        timeout: float = 600.0,
    ) -> None:
        """`timeout` is how many seconds the server may stay silent in the middle of an answer."""
        self._transport = Transport(url, api_key, retries or Retries(), timeout)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._transport.url

    def close(self) -> None:
        """Close the connections; sessions stay open at the server."""
        self._transport.http.close()

    def session(
        self,
        system: str | None = None,
        id: str | None = None,  # noqa: A002
        ttl: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Session:
        """Open a conversation; `ttl` is how many seconds it may be idle."""
        call = calls.open_session(id, system, ttl, metadata)
        assert call.body is not None
        self._transport.ask(call)
        return Session(self._transport, call.body["id"], system)

    def resume(self, id: str) -> Session:  # noqa: A002
        """Go on with a session that is open at the server."""
        view = SessionView.from_body(self._transport.ask(calls.show_session(id)))
        return Session(self._transport, view.id)

    def sessions(self) -> list[SessionView]:
        """All sessions of this key."""
        return [SessionView.from_body(body) for body in self.ask(calls.list_sessions())["sessions"]]

    def memory(self) -> dict[str, Any]:
        """The ledger: units by holder kind, component and tier; the largest holders; findings."""
        return self.ask(calls.memory())

    def metrics(self) -> dict[str, float]:
        """The server's figures by name and labels, for those who have the admin key."""
        page = self._transport.read(calls.metrics())
        return {} if page is None else calls.parse_metrics(page)

    def models(self) -> list[str]:
        """The names of the models that the server has."""
        return [str(model["id"]) for model in self.ask(calls.models())["data"]]

    def generate(
        self,
        prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        model: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generated:
        """Complete one or more prompts, texts or lists of token ids, without a session."""
        name = model if model is not None else self.models()[0]
        return Generated.from_body(self.ask(calls.generate(name, prompt, sampling)))

    def ask(self, call: Call) -> Body:
        """Send any call and return the JSON object that it is answered with."""
        return self._transport.ask(call)
