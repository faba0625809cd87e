"""A turn that is sent right after the client of the turn before it has disconnected is never a conflict.

Over real sockets, in many rounds: every one of them must be accepted. A turn whose client is connected stays
the only one of its session.
"""

import asyncio
import http.client
import json
import socket
from typing import Any

import pytest

from holdfast.server import occupants
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.occupants import Occupants
from tests.server.serving import Server
from tests.server.test_disconnects import ENDLESS, send

ROUNDS = 60


class Kept:
    """A connection that stays open, so that a request on it takes no handshake."""

    def __init__(self, server: Server) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=60)
        self.connection.connect()
        self.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())


def endless(name: str, dialect: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A turn that speaks until its client goes; token ids, so that nothing is waited for before it starts."""
    if dialect == "sessions":
        return f"/v1/sessions/{name}/turns", {
            "input": [97, 98],
            "stream": True,
            "sampling": ENDLESS,
            **fields,
        }
    if dialect == "completions":
        return "/v1/completions", {"prompt": [97, 98], "session_id": name, "stream": True, **ENDLESS}
    params = {"max_new_tokens": 7000, "ignore_eos": True}
    return "/generate", {
        "input_ids": [97, 98],
        "session_params": {"id": name},
        "stream": True,
        "sampling_params": params,
    }


@pytest.mark.parametrize("hears", [True, False], ids=["while it speaks", "before it starts"])
@pytest.mark.parametrize("dialect", ["sessions", "completions", "generate"])
def test_a_turn_right_after_a_disconnect_is_accepted(echo: Server, dialect: str, hears: bool) -> None:
    name, kept, statuses = echo.open(), Kept(echo), []
    for _ in range(ROUNDS):
        connection = send(echo, *endless(name, dialect))
        if hears:
            heard = b""
            while b"data:" not in heard:
                heard += connection.recv(1 << 16)
        connection.close()
        body = {"input": [99, 100], "sampling": {"max_tokens": 2}}
        status, shown = kept.post(f"/v1/sessions/{name}/turns", body)
        statuses.append(status)
        assert status != 200 or shown["token_ids"] == [99, 100]
    assert statuses == [200] * ROUNDS
    assert echo.state(name)["turns"] == ROUNDS, "each of the others was rolled back"


def test_a_turn_that_is_sent_again_under_its_id_after_a_disconnect(echo: Server) -> None:
    name, kept = echo.open(), Kept(echo)
    for number in range(10):
        path, body = endless(name, "sessions", turn_id=f"t{number}")
        body = {**body, "sampling": {"max_tokens": 3000, "ignore_eos": True}}
        connection = send(echo, path, body)
        connection.recv(1)
        connection.close()
        status, shown = kept.post(path, {**body, "stream": False, "sampling": {"max_tokens": 2}})
        assert (status, shown.get("token_ids")) in ((200, [97, 98]), (409, None))
        assert status == 200 or shown["error"]["code"] == "turn_conflict"


def test_a_turn_beside_one_whose_client_is_connected_is_refused(echo: Server) -> None:
    name, kept = echo.open(), Kept(echo)
    path, body = endless(name, "sessions")
    connection = send(echo, path, body)
    heard = connection.recv(1 << 16)
    answers = [kept.post(path, {"input": [99], "sampling": {"max_tokens": 1}}) for _ in range(3)]
    assert [status for status, _ in answers] == [409] * 3
    assert {shown["error"]["code"] for _, shown in answers} == {"session_busy"}
    connection.settimeout(60)
    more = connection.recv(1 << 16)
    assert heard and more, "it goes on to speak"
    connection.close()
    status, _ = kept.post(path, {"input": [99], "sampling": {"max_tokens": 1}})
    assert status == 200


# --- the rule alone ----------------------------------------------------------------------------------


class Someone:
    """A client that disconnects when the test says, or after it was asked so often."""

    def __init__(self, stays: int = 1 << 30) -> None:
        self.stays = stays

    @property
    def gone(self) -> bool:
        self.stays -= 1
        return self.stays < 0


def feed(number: int) -> TurnFeed:
    command = wire.StartTurn(number, f"t-{number}", "a", [1], wire.SamplingFields(), session="a/s")
    return TurnFeed(command, lambda _: None)


def end(turn: TurnFeed) -> None:
    turn.finish(wire.End(turn.call, "aborted", "", "", [], 1, 0, 1, 0.0, 0.0, 0.0))


def test_only_turns_whose_clients_are_gone_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupants, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(occupants, "LOOK_SECONDS", 0.001)
    left: list[TurnFeed] = []

    async def main() -> None:
        turns = Occupants(left.append)
        first, second = feed(1), feed(2)
        alone = turns.enter("a/t", Someone())
        assert not await turns.vacated(alone), "no other turn of this server's"
        turns.remove(alone)
        stays = turns.enter("a/s", Someone())
        turns.started(stays, first)
        mine = turns.enter("a/s", Someone())
        assert not await turns.vacated(mine) and not left, "the other is connected"
        kept = turns.enter("a/s", None)
        turns.started(kept, second)
        assert mine.others == [kept] and not await turns.vacated(mine) and not left, "it outlives its client"
        late = turns.enter("a/s", Someone(stays=3))
        assert late.others == [stays, mine, kept] and mine.others == [late]
        # Its start has not been answered: it is ended as soon as it has.
        monkeypatch.setattr(occupants, "GRACE_SECONDS", 60.0)
        waiting = asyncio.ensure_future(turns.vacated(mine))
        await asyncio.sleep(0.005)
        third = feed(3)
        turns.started(late, third)
        assert await waiting and left == [third]
        assert not await turns.vacated(late), "nobody waits for it"
        end(third)
        turns.turn_ended(third)
        mine.others = [stays, late]
        assert await turns.vacated(mine) and left == [third], "it has ended, and is not ended again"
        assert mine.others == [stays]
        for turn in (first, second):
            end(turn)
            turns.turn_ended(turn)
        turns.remove(mine)
        assert len(turns) == 0

    asyncio.run(main())


def test_the_next_turn_ends_one_whose_client_is_gone_before_it_is_sent() -> None:
    left: list[TurnFeed] = []

    async def main() -> None:
        turns, first = Occupants(left.append), feed(1)
        gone = turns.enter("a/s", Someone(stays=0))
        turns.started(gone, first)
        turns.enter("a/s", None)
        assert left == [first]
        over = feed(2)
        end(over)
        again = turns.enter("a/t", None)
        turns.started(again, over)
        assert len(turns) == 1, "a turn that is over when its start is answered is not in flight"

    asyncio.run(main())
