"""The socket between the API process and the engine process: frames, callbacks and tasks are counted."""

import asyncio
import socket
import stat
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from holdfast.server.link.channel import FRAMES_MAX, Channel
from holdfast.server.link.frames import READ_BYTES, Frames, FrameSocket, framed

FRAMES = 3 * FRAMES_MAX


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(story(), 30)

    asyncio.run(limited())


async def opened(path: Path, hear: Callable[[bytes], None]) -> tuple[Channel, FrameSocket]:
    """Both ends, connected."""
    channel = Channel(hear)
    await channel.listen(path)
    there = FrameSocket.connect(str(path))
    while channel._transport is None or len(asyncio.all_tasks()) > 2:
        await asyncio.sleep(0)
    return channel, there


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


# --- frames ---------------------------------------------------------------------------------------


def test_frames_are_found_however_the_bytes_come() -> None:
    sent = [b"", b"a", b"b" * 300, b"", b"c" * 70_000]
    whole = b"".join(map(framed, sent))
    random = Random(5)
    for _ in range(50):
        cuts = sorted(random.randrange(len(whole)) for _ in range(random.randrange(12)))
        frames, found = Frames(), list[bytes]()
        for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            frames.feed(whole[begin:end])
            while (frame := frames.take()) is not None:
                found.append(frame)
        assert found == sent


def ends() -> tuple[FrameSocket, socket.socket]:
    here, there = socket.socketpair()
    return FrameSocket(here), there


def test_what_the_other_process_does_not_take_is_kept_and_nobody_waits() -> None:
    here, there = ends()
    sent = [bytes([number]) * (READ_BYTES // 2) for number in range(16)]
    for each in sent:
        here.send(each)
    assert not here.flush(), "more than a socket holds"
    frames, found = Frames(), list[bytes]()
    while len(found) < len(sent):
        frames.feed(there.recv(READ_BYTES))
        assert here.wait(0.0) is False, "room is no news"
        while (frame := frames.take()) is not None:
            found.append(frame)
    assert found == sent and here.flush()
    here.close()
    there.close()


def test_a_frame_or_another_descriptor_ends_the_waiting() -> None:
    here, there = ends()
    other, news = socket.socketpair()
    assert not here.wait(0.0, [other.fileno()])
    there.send(framed(b"one") + framed(b"two")[:3])
    assert here.wait(10.0) and here.wait(10.0), "it is there until it is taken"
    assert here.receive() == b"one" and here.receive() is None
    there.send(framed(b"two")[3:])
    assert here.receive() == b"two"
    news.send(b"!")
    assert here.wait(10.0, [other.fileno()]) and here.receive() is None
    assert not here.wait(0.0), "it is not watched any more"
    for each in (here, there, other, news):
        each.close()


def test_the_end_of_the_other_process_is_quiet() -> None:
    here, there = ends()
    there.send(framed(b"last") + b"\x09")
    there.close()
    assert here.receive() == b"last" and here.receive() is None
    assert not here.wait(0.0), "the end is no news for ever"
    here.send(b"x" * READ_BYTES)
    assert here.flush() and here.receive() is None
    here.close(10.0)


def test_an_end_is_noticed_by_a_send_as_well() -> None:
    here, there = ends()
    there.close()
    for _ in range(3):
        here.send(b"x")
    assert here.flush() and not here.wait(0.0)
    here.close()


def test_closing_waits_for_the_other_process_only_so_long() -> None:
    here, there = ends()
    here.send(b"x" * (16 * READ_BYTES))
    here.close(0.05)
    taken = b"".join(iter(lambda: there.recv(READ_BYTES), b""))
    assert len(taken) < 16 * READ_BYTES, "nobody read while it was closed"
    there.close()
    here, there = ends()
    here.send(b"x" * (16 * READ_BYTES))
    closing = threading.Thread(target=here.close, args=(60.0,))
    closing.start()
    taken = b"".join(iter(lambda: there.recv(READ_BYTES), b""))
    assert len(taken) == len(framed(b"")) + 16 * READ_BYTES, "the rest comes while the other end is closing"
    closing.join()
    there.close()


# --- the event loop's end -------------------------------------------------------------------------


def test_many_frames_are_heard_in_few_callbacks_and_without_tasks(path: Path) -> None:
    async def story() -> None:
        passes: list[int] = []
        heard: list[bytes] = []
        channel, there = await opened(path, heard.append)
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
        there.close()

    run(story)


def test_questions_and_answers_at_the_same_time_are_all_heard(path: Path) -> None:
    async def story() -> None:
        heard: list[bytes] = []
        channel, there = await opened(path, heard.append)
        asked = 0
        for number in range(200):
            there.send(b"%d" % number)
            channel.send(b"question")
            while len(heard) <= number:
                await asyncio.sleep(0)
            while there.receive() is not None:
                asked += 1
        while asked < 200:
            await asyncio.sleep(0)
            asked += there.receive() is not None
        channel.close()
        there.close()

    run(story)


def test_what_is_sent_before_the_process_connects_arrives_in_order(path: Path) -> None:
    async def story() -> None:
        channel = Channel(lambda _frame: None)
        await channel.listen(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for number in range(5):
            channel.send(b"%d" % number)
        there = FrameSocket.connect(str(path))
        got: list[bytes] = []
        while len(got) < 5:
            await asyncio.sleep(0)
            frame = there.receive()
            got += [] if frame is None else [frame]
        assert got == [b"%d" % number for number in range(5)]
        channel.close()
        there.close()

    run(story)


def test_a_second_process_that_connects_is_sent_away(path: Path) -> None:
    async def story() -> None:
        heard: list[bytes] = []
        channel, there = await opened(path, heard.append)
        there.send(b"mine")
        while not heard:
            await asyncio.sleep(0)
        other = FrameSocket.connect(str(path))
        other.send(b"foreign")
        there.send(b"mine")
        while len(heard) < 2 or not other._ended:
            await asyncio.sleep(0)
            other.receive()
        assert heard == [b"mine", b"mine"]
        channel.close()
        there.close()
        other.close()

    run(story)


def test_what_the_hearer_raises_ends_the_channel_and_a_closed_one_hears_nothing(path: Path) -> None:
    async def story() -> None:
        heard: list[bytes] = []

        def hear(frame: bytes) -> None:
            heard.append(frame)
            raise ValueError(frame.decode())

        channel, there = await opened(path, hear)
        there.send(b"wrong")
        there.send(b"later")
        with pytest.raises(ValueError, match="wrong"):
            await channel.ended
        await asyncio.sleep(0.01)
        assert heard == [b"wrong"]
        channel.close()
        there.close()
        other, there = await opened(path.with_name("t"), heard.append)
        there.send(b"late")
        other.close()
        await asyncio.sleep(0.01)
        assert heard == [b"wrong"] and other.ended.cancelled()
        other.send(b"dropped")
        there.close()

    run(story)
