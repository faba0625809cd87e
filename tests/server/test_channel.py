"""The socket to the engine process on the event loop: frames, callbacks and tasks are counted."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import zmq

from holdfast.server.link.channel import FRAMES_MAX, Channel

FRAMES = 3 * FRAMES_MAX


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def pair(context: zmq.Context[zmq.Socket[bytes]], name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (here, there):
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
    here.bind(f"inproc://{name}")
    return here, there


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(story(), 30)

    asyncio.run(limited())


def test_many_frames_are_heard_in_few_callbacks_and_without_tasks(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async def story() -> None:
        here, there = pair(context, "many")
        there.connect("inproc://many")
        passes: list[int] = []
        heard: list[bytes] = []
        channel = Channel(here, heard.append)
        for number in range(FRAMES):
            there.send(b"%d" % number)
        while len(heard) < FRAMES:
            await asyncio.sleep(0)
            passes.append(len(heard))
            assert len(asyncio.all_tasks()) <= 2, "this one, and the one that limits it"
        assert heard == [b"%d" % number for number in range(FRAMES)]
        batches = [after - before for before, after in zip([0, *passes], passes, strict=False)]
        assert max(batches) <= 2 * FRAMES_MAX and len([each for each in batches if each]) <= 4
        channel.close()

    run(story)


def test_an_answer_that_comes_while_something_is_sent_is_heard(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """A send may take the news of a frame with it: it is looked for all the same."""

    async def story() -> None:
        here, there = pair(context, "answer")
        there.connect("inproc://answer")
        heard: list[bytes] = []
        channel = Channel(here, heard.append)
        for number in range(200):
            there.send(b"%d" % number)
            channel.send(b"question")
            while len(heard) <= number:
                await asyncio.sleep(0)
        assert sum(1 for _ in iter(lambda: there.poll(0) and there.recv(), 0)) == 200
        channel.close()

    run(story)


def test_what_is_sent_before_the_process_connects_arrives_in_order(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async def story() -> None:
        here, there = pair(context, "early")
        channel = Channel(here, lambda _frame: None)
        for number in range(5):
            channel.send(b"%d" % number)
        there.connect("inproc://early")
        there.send(b"hello")
        got: list[bytes] = []
        while len(got) < 5:
            await asyncio.sleep(0)
            if there.poll(0):
                got.append(there.recv())
        assert got == [b"%d" % number for number in range(5)]
        channel.close()

    run(story)


def test_what_the_hearer_raises_ends_the_channel_and_a_closed_one_hears_nothing(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async def story() -> None:
        here, there = pair(context, "ends")
        there.connect("inproc://ends")
        heard: list[bytes] = []

        def hear(frame: bytes) -> None:
            heard.append(frame)
            raise ValueError(frame.decode())

        channel = Channel(here, hear)
        there.send(b"wrong")
        there.send(b"later")
        with pytest.raises(ValueError, match="wrong"):
            await channel.ended
        await asyncio.sleep(0.01)
        assert heard == [b"wrong"]
        channel.close()
        other = Channel(here, heard.append)
        other.close()
        await asyncio.sleep(0.01)
        assert heard == [b"wrong"] and other.ended.cancelled()

    run(story)
