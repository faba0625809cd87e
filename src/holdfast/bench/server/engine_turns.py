"""Turns of an engine that takes no time, driven by the messages of the API process, without sockets."""

from __future__ import annotations

import statistics
import time

from holdfast.engine.echo import open_echo
from holdfast.engine.options import make_options
from holdfast.server.link import wire
from holdfast.server.link.commands import EngineCommands
from holdfast.server.link.results import Outbox

__all__ = ["engine_turns"]

ROUNDS = 7


def engine_turns(model: str) -> dict[str, float]:
    """Turn 150 beside turn 10 without sockets, in processor time: the round with the median ratio."""
    rounds = [one_round(model) for _ in range(ROUNDS)]
    middle = sorted(rounds, key=lambda figures: figures["ratio_engine_turn_150_to_10"])
    return middle[len(middle) // 2]


def one_round(model: str) -> dict[str, float]:
    """160 turns of 8 sessions on a new engine."""
    outbox = Outbox()
    loop = open_echo(model, make_options(overlap=True), outbox)
    commands = EngineCommands(loop, outbox)
    for number in range(8):
        commands.receive(wire.OpenSession(0, f"public/{number}", "public"))
    sampling = wire.SamplingFields(max_tokens=8, ignore_eos=True)
    taken: list[float] = []
    for turn in range(160):
        began = time.thread_time()
        for number in range(8):
            call = turn * 8 + number + 1
            session = f"public/{number}"
            said = list(range(65, 81))
            commands.receive(wire.StartTurn(call, f"t-{call}", "public", said, sampling, session=session))
        while loop.busy:
            loop.step()
            commands.retry()
            commands.take_reports()
        taken.append((time.thread_time() - began) * 1000)
    early, late = statistics.median(taken[5:15]), statistics.median(taken[145:155])
    return {
        "engine_turn_10_ms": early,
        "engine_turn_150_ms": late,
        "ratio_engine_turn_150_to_10": late / early,
    }
