"""Silence is counted in time that the listener lived: with a clock of the test, and with a stopped server."""

import asyncio
import os
import signal
import time

import pytest

from holdfast.server.link.lived_time import LivedTime, wait_lived
from tests.server.conftest import Serve


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_ticks_in_time_count_as_they_are() -> None:
    clock = Clock()
    lived = LivedTime(1.0, clock)
    for passed in (1.0, 1.25, 0.5):
        clock.now += passed
        lived.tick()
    assert lived.seconds == 2.75
    lived.reset()
    clock.now += 1.0
    assert lived.tick() == 1.0


@pytest.mark.parametrize("pause", [10.0, 1e6])
def test_a_pause_of_any_length_counts_as_one_late_tick(pause: float) -> None:
    clock = Clock()
    lived = LivedTime(1.0, clock)
    clock.now += 1.0
    lived.tick()
    clock.now += pause
    assert lived.tick() == 3.0
    clock.now += 1.0
    assert lived.tick() == 4.0, "and what follows counts again"


def test_what_ends_is_waited_for_and_what_does_not_is_given_up() -> None:
    async def waits() -> tuple[bool, bool]:
        loop = asyncio.get_running_loop()
        ends: asyncio.Future[int] = loop.create_future()
        loop.call_later(0.01, ends.set_result, 0)
        never: asyncio.Future[int] = loop.create_future()
        return await wait_lived(ends, 60.0, 0.5), await wait_lived(never, 0.05, 0.01)

    assert asyncio.run(waits()) == (True, False)


def test_a_server_that_was_stopped_for_longer_than_its_patience_keeps_its_engine(serve: Serve) -> None:
    server = serve("echo", "--kv-tokens", "16384", "--hang-seconds", "2")
    name, engine = server.open("kept"), server.engine_pid()
    for both in (False, True):
        stopped = [server.process.pid, *([engine] if both else [])]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)  # Longer than it waits for an engine that says nothing.
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert server.say(name, "hello")["text"] == "hello", "no session was lost"
        assert server.engine_pid() == engine
    assert "holdfast_engine_restarts_total 0.0" in server.get("/metrics").text
