"""The chat's conversations with a server.

A thread reads the answer, so that Ctrl-C works while the server is silent. Text that was read but not shown
is discarded when the model is interrupted.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, cast

from holdfast.cli.sampling_options import CHAT_DEFAULTS, SUGGESTIONS
from holdfast.cli.terminal import Chat, Cost, Speech, Talk
from holdfast.client import Client, HoldfastError, Retries, Sampling, Session, Turn, calls

__all__ = ["run"]

POLL_SECONDS = 0.05


class RemoteSpeech:
    """A turn on a server."""

    def __init__(self, session: Session, turn: Turn) -> None:
        self._session = session
        self._turn = turn
        self._tokens_taken = 0
        self._read: queue.SimpleQueue[tuple[str, int] | HoldfastError | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        try:
            for piece in self._turn:
                self._read.put((piece, self._turn.tokens_shown))
        except HoldfastError as error:
            self._read.put(error)
        else:
            self._read.put(None)

    def take(self) -> str | None:
        """The next piece, or nothing after a moment."""
        try:
            read = self._read.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return ""
        if read is None:
            return None
        if isinstance(read, HoldfastError):
            raise read
        text, self._tokens_taken = read
        return text

    def cut(self) -> None:
        """Interrupt; keep the text taken so far, and wait for the server's result."""
        self._session.interrupt(keep=self._tokens_taken)
        self._reader.join()

    @property
    def usage(self) -> Cost:
        """What the turn cost."""
        self._reader.join()
        return self._turn.usage


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
        return RemoteSpeech(self._session, self._session.say(words, **self._host.sampling))

    def rewind(self, turns: int) -> None:
        """Rewind so that `turns` turns remain."""
        self._session.rewind(turns)

    def fork(self) -> Talk:
        """A second conversation that continues from here."""
        return self._host.adopt(self._session.fork())


class RemoteHost:
    """A server, and the sessions that were opened on it here."""

    refusals = (HoldfastError,)

    def __init__(self, client: Client, system: str | None, sampling: Sampling) -> None:
        self._client = client
        self._system = system
        self.sampling = sampling
        self._sessions: list[Session] = []

    def adopt(self, session: Session) -> RemoteTalk:
        """Take a session, to be closed at the end."""
        self._sessions.append(session)
        return RemoteTalk(self, session)

    def open(self) -> Talk:
        """Begin a conversation."""
        return self.adopt(self._client.session(self._system))

    def memory(self) -> dict[str, Any]:
        """Who holds the memory."""
        return self._client.memory()

    def close(self) -> None:
        """Close every session."""
        for session in self._sessions:
            session.close()


def run(url: str, api_key: str | None, system: str | None, stated: dict[str, Any]) -> None:
    """Talk to a server; raises `HoldfastError` if it is unreachable or rejects the key.

    `stated` are the sampling options given.
    """
    # An unreachable server is an error at once; later on, lost connections are retried.
    with Client(url, api_key, retries=Retries(attempts=1)) as client:
        suggested = client.ask(calls.models())[0].get("sampling_defaults")
    with Client(url, api_key) as client:
        silent = suggested is not None and all(suggested.get(name) is None for name in SUGGESTIONS)
        sampling = cast(Sampling, {**CHAT_DEFAULTS, **stated} if silent else stated)
        host = RemoteHost(client, system, sampling)
        try:
            Chat(host).run()
        finally:
            host.close()
