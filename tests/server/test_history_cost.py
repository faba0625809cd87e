"""A turn costs the same at 1k and at 32k of history, from its command to its end: lines, bytes and memory."""

import tracemalloc

import pytest

from holdfast.server.link import wire
from holdfast.server.link.commands import EngineCommands
from tests.server.in_process import echo_commands
from tests.server.test_loop_work import lines

SHORT, LONG = 1024, 32_000
WANTED = 8


class Talk:
    """One session with a history, and what its next turns cost."""

    def __init__(self, model: str, history: int) -> None:
        sizes = {"kv_tokens": 1 << 16, "window_tokens": 1 << 16, "state_slots": 64}
        self.engine: EngineCommands = echo_commands(model, overlap=True, context_length=40_000, **sizes)
        self.call = 1
        self.engine.receive(wire.OpenSession(1, "ann/s", "ann"))
        self.turn(history)

    def turn(self, given: int) -> int:
        """Run a turn as messages; returns the bytes of all its messages."""
        self.call += 1
        sampling = wire.SamplingFields(max_tokens=WANTED, ignore_eos=True)
        tokens = [65 + place % 20 for place in range(given)]
        known = self.engine.loop.scheduler.registry.sessions["ann/s"].sequence.known
        command = wire.StartTurn(
            self.call, f"t-{self.call:08}", "ann", tokens, sampling, session="ann/s", known=known
        )
        frame = wire.encode(command)
        moved = len(frame)
        self.engine.receive(wire.decode_command(frame))
        while self.engine.loop.busy:
            self.engine.loop.step()
            self.engine.retry()
            for report in self.engine.take_reports():
                moved += len(wire.encode(report))
        return moved

    def memory(self) -> int:
        """The most that a turn allocates at once."""
        tracemalloc.start()
        try:
            self.turn(16)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("model", ["echo", "echo-window", "echo-hybrid"])
def test_a_turn_costs_the_same_at_any_length_of_its_history(model: str) -> None:
    talks = [Talk(model, SHORT), Talk(model, LONG)]
    for talk in talks:
        for _ in range(3):
            talk.turn(16)
    counted = [[lines(lambda talk=talk: talk.turn(16)) for _ in range(4)] for talk in talks]  # type: ignore[misc]
    assert max(counted[1]) <= 1.1 * max(counted[0]), "lines of the product"
    short, long = (talk.turn(16) for talk in talks)
    assert abs(long - short) <= 16, "bytes between the processes: a number may be longer"
    memory = [min(talk.memory() for _ in range(3)) for talk in talks]
    # A copy of the history, as a list or packed, would be at least 128 KiB.
    assert memory[1] - memory[0] < 64 << 10
