"""What every client is asked for: turns, rounds of tools, parallel calls, an interruption, and a restart.

The model repeats what it is told, so a text is the answer to itself, and a text that is a call is called.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from tests.clients.conftest import serving
from tests.clients.recording import Recorder
from tests.clients.telling import BOTH, CALL, LONG, SEEN, TWICE

__all__ = ["TOLD", "Talk", "tell"]

SIZES = ("--kv-tokens", "32768", "--context-length", "16384", "--tool-parser", "hermes")
TOLD = ("two turns", "tool round", "two rounds", "parallel calls", "interruption", "restart")
"""The stories that `tell` tells."""


class Talk(Protocol):
    """One conversation of a client, whose tool `look` answers as `telling.look` does."""

    looked: list[str]

    async def connect(self, url: str) -> None:
        """Call this address from now on."""

    async def say(self, text: str) -> str:
        """One turn, with the rounds of its tools; returns the last answer."""

    async def cut(self, text: str) -> str:
        """A turn that is stopped at its first piece of text; returns what came."""


def tell(talk: Talk, folder: Path, rounds: int = 2) -> None:
    """Tell the story to a server with a journal, and its end to the one that is started after it.

    One of `rounds` is for clients that send results as JSON: a call that is a result is then no call when it
    is repeated.
    """

    async def call(text: str, *looked: str) -> None:
        before = len(talk.looked)
        said = await talk.say(text)
        assert SEEN in said, said
        assert sorted(talk.looked[before:]) == sorted(looked), talk.looked

    async def call_again() -> None:
        await (call(TWICE, "twice", "me") if rounds == 2 else call(CALL, "me"))

    async def first(url: str) -> None:
        await talk.connect(url)
        assert await talk.say("hello") == "hello"
        assert await talk.say("again") == "again"
        await call(CALL, "me")
        await call_again()
        await call(BOTH, "left", "right")
        assert 0 < len(await talk.cut(LONG)) < len(LONG)
        assert await talk.say("after") == "after"

    async def second(url: str) -> None:
        await talk.connect(url)
        assert await talk.say("later") == "later"
        await call_again()

    async def both() -> None:
        # One event loop: clients keep objects that belong to theirs.
        for part in (first, second):
            with serving(folder / "errors", "echo", *SIZES, "--journal", str(folder / "journal")) as url:
                recorder = Recorder(url)
                try:
                    await asyncio.wait_for(part(f"{recorder.url}/v1"), 240)
                    assert recorder.refused == []
                finally:
                    recorder.close()

    asyncio.run(both())
