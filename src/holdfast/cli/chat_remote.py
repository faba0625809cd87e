"""The chat's conversations with a server.

A thread reads the answer, so that Ctrl-C works while the server is silent. Text that was read but not shown
is discarded when the model is interrupted.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from holdfast.cli.answer_options import AnswerAsked
from holdfast.cli.sampling_options import CHAT_DEFAULTS, SUGGESTIONS
from holdfast.cli.terminal import Chat, Cost, Speech, Talk
from holdfast.client import (
    Client,
    HoldfastError,
    Retries,
    Session,
    ToolCall,
    Turn,
    TurnEvent,
    calls,
)
from holdfast.client.values import TurnFields

__all__ = ["run"]

POLL_SECONDS = 0.05


class RemoteSpeech:
    """A turn on a server."""

    def __init__(self, session: Session, turn: Turn) -> None:
        self._session = session
        self._turn = turn
        self._tokens_taken = 0
        self._read: queue.SimpleQueue[tuple[TurnEvent, int] | HoldfastError | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        try:
            for event in self._turn.events():
                self._read.put((event, self._turn.tokens_settled))
        except HoldfastError as error:
            self._read.put(error)
        else:
            self._read.put(None)

    def take(self) -> Sequence[TurnEvent] | None:
        """The next event, or nothing after a moment."""
        try:
            read = self._read.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return ()
        if read is None:
            return None
        if isinstance(read, HoldfastError):
            raise read
        event, self._tokens_taken = read
        return (event,)

    def cut(self) -> None:
        """Interrupt; keep the output taken so far, without half a call, and wait for the server's result."""
        self._session.interrupt(keep=self._tokens_taken)
        self._reader.join()

    @property
    def usage(self) -> Cost:
        """The cost of the turn."""
        self._reader.join()
        return self._turn.usage

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The complete calls that the turn ended in."""
        self._reader.join()
        return self._turn.tool_calls


class RemoteTalk:
    """A session of a server."""

    def __init__(self, host: RemoteHost, session: Session) -> None:
        self._host = host
        self._session = session

    @property
    def turns(self) -> int:
        """How many turns it has."""
        return self._session.turns

    def say(self, words: str) -> Speech:
        """Begin a turn."""
        return RemoteSpeech(self._session, self._session.say(words, **self._host.said))

    def tool_results(self, results: Mapping[str, str]) -> Speech:
        """Begin a turn with the results of tool calls, by their ids."""
        return RemoteSpeech(self._session, self._session.tool_results(results, **self._host.answered))

    def rewind(self, turns: int) -> None:
        """Rewind so that `turns` turns remain."""
        self._session.rewind(turns)

    def fork(self) -> Talk:
        """A second conversation that continues from here."""
        return self._host.adopt(self._session.fork())


class RemoteHost:
    """A server, and the sessions that were opened on it here."""

    refusals = (HoldfastError,)

    def __init__(
        self, client: Client, system: str | None, sampling: Mapping[str, Any], asked: AnswerAsked
    ) -> None:
        self._client = client
        self._system = system
        self._tools = asked.tools
        self.said = cast(TurnFields, {**sampling, **asked.said})
        """The fields of turns with the user's words."""
        self.answered = cast(TurnFields, {**sampling, **asked.results})
        """The fields of turns with results of tools."""
        self._sessions: list[Session] = []

    def adopt(self, session: Session) -> RemoteTalk:
        """Take a session, to be closed at the end."""
        self._sessions.append(session)
        return RemoteTalk(self, session)

    def open(self) -> Talk:
        """Begin a conversation."""
        return self.adopt(self._client.session(self._system, tools=self._tools or None))

    def memory(self) -> dict[str, Any]:
        """Who holds the memory."""
        return self._client.memory()

    def close(self) -> None:
        """Close every session."""
        for session in self._sessions:
            session.close()


def run(
    url: str, api_key: str | None, system: str | None, stated: dict[str, Any], asked: AnswerAsked
) -> None:
    """Talk to a server; raises `HoldfastError` if it is unreachable or rejects the key.

    `stated` are the sampling options given, `asked` is what is asked of answers.
    """
    # An unreachable server is an error at once; later on, lost connections are retried.
    with Client(url, api_key, retries=Retries(attempts=1)) as client:
        suggested = client.ask(calls.models())[0].get("sampling_defaults")
    with Client(url, api_key) as client:
        silent = suggested is not None and all(suggested.get(name) is None for name in SUGGESTIONS)
        sampling = {**CHAT_DEFAULTS, **stated} if silent else stated
        host = RemoteHost(client, system, sampling, asked)
        try:
            Chat(host, shows_thinking=asked.shows_thinking).run()
        finally:
            host.close()
