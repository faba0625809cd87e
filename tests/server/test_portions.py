"""Long lists in bodies are read a portion at a time: no request holds the event loop for all of them.

Counted are the lines of the product that run between two turns of the loop. No time is measured.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from holdfast.engine.portions import Portions, in_turns
from holdfast.server import limits
from holdfast.server.conversation_keys import keys_of
from holdfast.server.http.bodies import Reading, decode_large
from holdfast.server.limits import MESSAGES_MAX, Room
from holdfast.server.prompts import ChatMessage, SessionMessage, plain_messages
from holdfast.server.responses.items import read_items
from holdfast.server.routes.messages_body import Message
from holdfast.server.routes.messages_input import read_conversation
from holdfast.server.routes.openai import CHAT_BODY
from holdfast.server.routes.sessions import read_input
from tests.server.test_loop_work import lines

ROOM = Room(1 << 20, 1 << 24)
SORTING_MAX = 2
"""Lines for each entry of the whole list that a portion may run, in comprehensions."""

Make = Callable[[int], Portions[Any]]


def said(count: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": f"{number} words"} for number in range(count)]


READERS: dict[str, Make] = {
    "limits": lambda count: limits.checking(msgspec.convert({"messages": said(count)}, CHAT_BODY.read), ROOM),
    "messages": lambda count: plain_messages(msgspec.convert(said(count), list[ChatMessage])),
    "input": lambda count: read_input(msgspec.convert(said(count), list[SessionMessage])),  # type: ignore[arg-type]
    "keys": lambda count: keys_of("ann", said(count), [], {}),
    "items": lambda count: read_items([{"type": "message", **each} for each in said(count)]),
    "anthropic's": lambda count: read_conversation(None, msgspec.convert(said(count), list[Message])),
}


def costs(work: Portions[Any]) -> list[int]:
    """The lines of each portion."""
    found: list[int] = []
    over = object()
    given: list[object] = []
    while not given or given[-1] is not over:
        found.append(lines(lambda: given.append(next(work, over))))
    return found


@pytest.mark.parametrize("reader", READERS)
def test_the_largest_portion_does_not_grow_with_the_list(reader: str) -> None:
    """But for what a comprehension takes to sort the entries."""
    few, many = (costs(READERS[reader](count)) for count in (MESSAGES_MAX // 16, MESSAGES_MAX))
    assert len(many) > 60 and len(many) >= 15 * (len(few) - 2), "there are more of them instead"
    assert max(many) <= max(few) + SORTING_MAX * MESSAGES_MAX
    assert sum(many) > 2 * max(many)


def test_other_tasks_have_turns_between_the_portions_of_a_body() -> None:
    content = json.dumps({"messages": said(MESSAGES_MAX)}).encode()

    async def packed(body: memoryview) -> memoryview:
        return memoryview(msgspec.msgpack.encode(msgspec.json.decode(body)))

    async def turns() -> int:
        reading = asyncio.ensure_future(decode_large(content, CHAT_BODY.read, Reading(1 << 24, ROOM, packed)))
        count = 0
        while not reading.done():
            count += 1
            await asyncio.sleep(0)
        assert len((await reading).messages) == MESSAGES_MAX
        return count

    assert asyncio.run(turns()) >= MESSAGES_MAX // limits.PORTION


def test_a_problem_ends_the_portions() -> None:
    messages = msgspec.convert([*said(1000), {"role": "root", "content": "x"}], list[ChatMessage])
    with pytest.raises(Exception, match=r"messages\[1000\].role"):
        asyncio.run(in_turns(plain_messages(messages)))
