"""`POST /v1/sessions/{id}/compact`: a range of turns gives way to a text, over HTTP."""

import asyncio
from typing import Any

import pytest

from holdfast.client import AsyncClient, BadRequest, Client, Conflict
from tests.server.serving import Server

BRIEF = {"sampling": {"max_tokens": 4}}


def talked(server: Server, turns: int = 3) -> str:
    name = server.open()
    for number in range(turns):
        answer = server.post(f"/v1/sessions/{name}/turns", {"input": f"turn number {number}", **BRIEF})
        assert answer.status_code == 200, answer.text
    return name


def test_the_answer_counts_what_is_computed_again(echo: Server) -> None:
    name = talked(echo)
    before = echo.state(name)["tokens"]["known"]
    body = {"from_turn": 2, "to_turn": 2, "text": "short"}
    shown = echo.post(f"/v1/sessions/{name}/compact", body).json()
    assert (shown["id"], shown["turns"]) == (name, 3)
    known, left = shown["tokens"]["known"], shown["recomputed_tokens"]
    assert known < before and 0 < left < known
    usage = echo.post(f"/v1/sessions/{name}/turns", {"input": "next", **BRIEF}).json()["usage"]
    assert usage["cached_tokens"] >= known - left
    assert usage["computed_tokens"] == usage["prompt_tokens"] - usage["cached_tokens"]


def test_a_repeated_request_is_carried_out_once(echo: Server) -> None:
    name = talked(echo)
    body = {"from_turn": 1, "to_turn": 2, "text": "short", "request_id": "r1"}
    first, second = (echo.post(f"/v1/sessions/{name}/compact", body).json() for _ in range(2))
    assert (first["turns"], second["turns"]) == (2, 2)
    assert first["recomputed_tokens"] == second["recomputed_tokens"]


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"from_turn": 1, "to_turn": 9, "text": "x"}, "to_turn", 404),
        ({"from_turn": 2, "to_turn": 1, "text": "x"}, "to_turn", 400),
        ({"from_turn": 0, "to_turn": 1, "text": "x"}, "from_turn", 400),
        ({"from_turn": 1, "to_turn": True, "text": "x"}, "to_turn", 400),
        ({"from_turn": 1, "to_turn": 2**40, "text": "x"}, "to_turn", 400),
        ({"to_turn": 1, "text": "x"}, "from_turn", 400),
        ({"from_turn": 1, "to_turn": 1}, "text", 400),
        ({"from_turn": 1, "to_turn": 1, "text": ""}, "text", 400),
        ({"from_turn": 1, "to_turn": 1, "text": "x" * 9000}, "text", 400),
        ({"from_turn": 1, "to_turn": 1, "text": "x" * 8180}, "text", 400),
        ({"from_turn": 1, "to_turn": 1, "messages": []}, "messages", 400),
        ({"from_turn": 1, "to_turn": 1, "messages": [{"role": "king", "content": "x"}]}, "messages", 400),
        ({"from_turn": 1, "to_turn": 1, "text": "x", "messages": []}, "text", 400),
        ({"from_turn": 1, "to_turn": 1, "text": "x", "turns": 1}, "turns", 400),
    ],
)
def test_bad_input_names_its_field_and_changes_nothing(
    echo: Server, body: dict[str, Any], param: str, status: int
) -> None:
    name = talked(echo, 2)
    before = echo.state(name)["tokens"]["known"]
    answer = echo.post(f"/v1/sessions/{name}/compact", body)
    assert answer.status_code == status, answer.text
    assert param in answer.json()["error"]["param"]
    assert echo.state(name)["tokens"]["known"] == before


def test_the_clients_compact_too(echo: Server) -> None:
    with Client(echo.url) as client, client.session() as session:
        for number in range(3):
            session.say(f"turn number {number}", max_tokens=4).wait()
        assert session.compact(1, 2, "short") > 0
        assert session.turns == 2
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert session.compact(1, 1, messages) > 0
        with pytest.raises(BadRequest):
            session.compact(1, 1, "")
        with session.say("a long one " * 20, max_tokens=2000, ignore_eos=True) as turn:
            next(iter(turn))
            with pytest.raises(Conflict):
                session.compact(1, 1, "now")

    async def again() -> int:
        async with AsyncClient(echo.url) as client, await client.session() as session:
            await (await session.say("one", max_tokens=4)).wait()
            return await session.compact(1, 1, "short")

    assert asyncio.run(again()) > 0
