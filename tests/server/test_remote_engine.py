"""The API process's end of a link: engines that do not belong to it, and one that takes nothing."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast.server.dialects.wire_fields import SamplingFields
from holdfast.server.http.problems import Problem
from holdfast.server.link import remote_engine, wire
from holdfast.server.link.engine_client import GiveUp, TurnFeed
from holdfast.server.link.engine_set import EngineSet
from holdfast.server.link.frames import framed
from holdfast.server.link.tls import client_context, server_context, write_keys
from holdfast.server.link.worker import model_facts
from tests.server.in_process import echo_commands

WELCOME = wire.Welcome(wire.PROTOCOL, "e", "life", "model")
NEWER = wire.Welcome(wire.PROTOCOL + 1, "e", "life", "model")


class Observer:
    """Counts what an API process hears of."""

    def __init__(self) -> None:
        self.ready: list[list[str]] = []
        self.others: list[set[str]] = []
        self.lost = 0
        self.ended: list[TurnFeed] = []
        self.gone: list[str] = []
        self.stored: list[str] = []

    def session_seen(self, view: wire.SessionView) -> None:
        """Not counted."""

    def session_gone(self, session: str, _reason: str) -> None:
        self.gone.append(session)

    def session_stored(self, stored: wire.StoredSession) -> None:
        self.stored.append(stored.view.name)

    def session_taken_up(self, session: str, give: GiveUp, /) -> None:
        """Not counted."""

    def turn_ended(self, feed: TurnFeed) -> None:
        self.ended.append(feed)

    def engine_ready(self, ready: wire.Ready, others: object = ()) -> None:
        self.ready.append([stored.view.name for stored in ready.sessions])
        self.others.append(set(others))  # type: ignore[call-overload]

    def engine_lost(self, volatile: object = None) -> None:
        self.lost += 1


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "link.pem"
    write_keys(path)
    return path


def ready_report(*sessions: str) -> wire.Ready:
    """What an engine with some sessions says."""
    facts = model_facts(echo_commands().loop, "echo")
    stored = [
        wire.StoredSession(wire.SessionView(name, 0, None, 0), "ann", None, {}, 0.0) for name in sessions
    ]
    return wire.Ready(facts, wire.Vocabulary("", None, {}, []), stored)


async def listening(keys: Path, said: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> asyncio.Server:
    """Something that has the key, and says what it wants to whoever greets it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            length = int.from_bytes(await reader.readexactly(4), "little")
            greeting = wire.decode_command(await reader.readexactly(length))
            assert isinstance(greeting, wire.Greeting)
            await said(writer)
            while await reader.read(1 << 16):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context(str(keys)))


def address(server: asyncio.Server) -> str:
    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (framed(b"\xc1"), "a message that cannot be read"),
        (b"\xff\xff\xff\xff", "bytes, of at most"),
        (framed(wire.encode(NEWER)), f"it speaks version {NEWER.protocol} of the link"),
        (b"ready", "the engine did not say who it is"),
        (framed(wire.encode(wire.Unable("no room"))), "the engine refused the link: no room"),
    ],
)
def test_what_is_no_engine_is_left_and_the_process_lives(
    keys: Path, caplog: pytest.LogCaptureFixture, sent: bytes, why: str
) -> None:
    async def story() -> None:
        async def said(writer: asyncio.StreamWriter) -> None:
            writer.write(framed(wire.encode(ready_report())) if sent == b"ready" else sent)
            await writer.drain()

        server = await listening(keys, said)
        engines = EngineSet([address(server)], client_context(str(keys)), 5.0, Observer())
        running = asyncio.create_task(engines.remotes.run())
        while not any(why in message for message in caplog.messages):
            await asyncio.sleep(0.01)
        assert not running.done() and not engines.remotes.up
        number = engines.number()
        with pytest.raises(Problem) as refused:
            await engines.call(wire.OpenSession(number, "ann/s", "ann"), number)
        assert refused.value.code == "engine_unavailable"
        await engines.remotes.stop()
        await running
        server.close()
        await server.wait_closed()

    caplog.set_level(logging.WARNING)
    asyncio.run(asyncio.wait_for(story(), 30))


def test_an_engine_that_takes_nothing_refuses_what_is_new(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "UNSENT_MAX", 1 << 20)
    ready = ready_report("ann/s")

    async def story() -> None:
        observer = Observer()

        async def said(writer: asyncio.StreamWriter) -> None:
            writer.write(framed(wire.encode(WELCOME)) + framed(wire.encode(ready)))
            await asyncio.sleep(3600)  # Reads nothing from now on.

        server = await listening(keys, said)
        engines = EngineSet([address(server)], client_context(str(keys)), 60.0, observer)
        running = asyncio.create_task(engines.remotes.run())
        await engines.remotes.wait_ready()
        assert observer.ready == [["ann/s"]]
        refused: Problem | None = None
        starts = []
        for number in range(4096):
            long = wire.StartTurn(
                engines.number(), f"t-{number}", "ann", [1] * 65536, SamplingFields(), "ann/s"
            )
            starts.append(start := asyncio.create_task(engines.start([long])))
            await asyncio.sleep(0)
            if start.done() and isinstance(error := start.exception(), Problem):
                refused = error
                break
        assert refused is not None and refused.code == "engine_unavailable" and refused.retry_after
        assert engines.send(wire.CloseSession(engines.number(), "ann/s")), "what makes room is sent"
        await engines.remotes.stop()
        await running
        results = await asyncio.gather(*starts, return_exceptions=True)
        lost = [each for each in results if isinstance(each, Problem) and each.code == "engine_lost"]
        assert len(lost) == len(starts) - 1
        assert all(f"turn t-{number}" in each.message for number, each in enumerate(lost))
        assert observer.lost == 1
        server.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_two_engines_with_a_session_of_one_name_are_told_apart(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = ready_report("ann/one", "ann/both"), ready_report("ann/two", "ann/both")

    async def story() -> None:
        observer = Observer()
        servers = []
        for name, ready in (("a", first), ("b", second)):

            async def said(writer: asyncio.StreamWriter, name: str = name, ready: wire.Ready = ready) -> None:
                welcome = wire.Welcome(wire.PROTOCOL, name, name, "model")
                writer.write(framed(wire.encode(welcome)) + framed(wire.encode(ready)))
                await writer.drain()

            servers.append(await listening(keys, said))
        engines = EngineSet([address(each) for each in servers], client_context(str(keys)), 5.0, observer)
        running = asyncio.create_task(engines.remotes.run())
        while len(observer.ready) < 2:
            await asyncio.sleep(0.01)
        told = sorted(name for names in observer.ready for name in names)
        assert told == ["ann/both", "ann/one", "ann/two"], "the second of a name is not told"
        assert observer.others[1] == set(observer.ready[0]), "the first engine's sessions are not lost"
        owner = engines.places.directory.owner("ann/both")
        assert owner is not None
        other = next(each for each in map(address, servers) if each != owner)
        assert (
            not engines.places.disown("ann/both", other)
            and engines.places.directory.owner("ann/both") == owner
        )
        await engines.remotes.stop()
        await running
        for server in servers:
            server.close()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert "two engines have a session of one name" in caplog.messages


def test_a_port_that_nobody_listens_on_is_tried_again(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    taken.close()

    async def story() -> None:
        engines = EngineSet([f"127.0.0.1:{port}"], client_context(str(keys)), 5.0, Observer())
        running = asyncio.create_task(engines.remotes.run())
        while sum("no link to the engine" in message for message in caplog.messages) < 3:
            await asyncio.sleep(0.01)
        warned = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warned) == 1, "one line for a reason"
        await engines.remotes.stop()
        await running

    caplog.set_level(logging.DEBUG)
    asyncio.run(asyncio.wait_for(story(), 30))
