"""The rounds of `bench wire` in process: the same engine and the same commands, without sockets.

    python -m holdfast.bench.wire.inside MODEL    reads {"options", "workload"} from standard input

A client acts between two steps, at no cost: a turn follows the end of the one before it at once. Prints one
line of JSON for each round. A process of its own, so that the device is free for the server afterwards.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from holdfast.bench.wire.load import (
    ABORT_AFTER,
    ABORTED_TOKENS,
    Round,
    RoundSamples,
    TurnSample,
    Workload,
    tokens_of,
)
from holdfast.engine.options import make_options
from holdfast.engine.start.startup import open_loop
from holdfast.server.link import wire
from holdfast.server.link.commands import EngineCommands
from holdfast.server.link.results import Outbox

__all__ = ["run_inside"]


def run_inside(
    model: str, options: Mapping[str, Any], workload: Workload, progress: Callable[[str], None]
) -> list[RoundSamples]:
    """Run all rounds in a child process."""
    asked = json.dumps({"options": dict(options), "workload": asdict(workload)})
    command = [sys.executable, "-m", "holdfast.bench.wire.inside", model]
    found: list[RoundSamples] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None, "both are pipes"
        progress("in process")
        child.stdin.write(asked)
        child.stdin.close()
        for line in child.stdout:
            read = json.loads(line)
            found.append(
                RoundSamples(
                    [TurnSample(**turn) for turn in read["turns"]], read["seconds"], read["processor"]
                )
            )
            progress(f"in process: {len(found)} of {len(workload.rounds)} rounds")
    if child.returncode:
        raise RuntimeError(f"the engine in process ended with status {child.returncode}")
    return found


class Talk:
    """One stream: its turn in flight, when that began, and what has come of it."""

    __slots__ = ("began", "cut", "first", "last", "left", "pause", "tokens", "turn")

    def __init__(self, left: int) -> None:
        self.left = left
        """Turns that are still to begin."""
        self.turn = 0
        self.cut = False
        self.began = self.first = self.last = self.pause = 0.0
        self.tokens = 0


class InProcess:
    """The rounds on one engine."""

    def __init__(self, model: str, options: Mapping[str, Any], workload: Workload) -> None:
        self._workload = workload
        outbox = Outbox()
        self._loop = open_loop(model, make_options(**options), None, outbox)
        self._commands = EngineCommands(self._loop, outbox)
        self._calls = 0

    def run(self, number: int, each: Round) -> RoundSamples:
        """One round."""
        names = [f"public/wire-{number}-{stream}" for stream in range(each.streams)]
        for name in names:
            self._calls += 1
            self._commands.receive(wire.OpenSession(self._calls, name, "public"))
        samples, unused = RoundSamples(), RoundSamples()
        self._drive(names, 1, unused, lambda place, _: tokens_of(number * 1000 + place, 0, each.history), 1)
        wanted, given = self._workload.wanted, self._workload.given
        self._drive(names, 1, unused, lambda _, turn: tokens_of(0, turn, given), wanted)
        processor, began = time.process_time(), time.perf_counter()
        self._drive(names, self._workload.turns, samples, lambda _, turn: tokens_of(0, turn, given), wanted)
        samples.seconds = time.perf_counter() - began
        samples.processor = {"engine": time.process_time() - processor}
        turns = 2 * self._workload.aborts
        self._drive(names, turns, samples, lambda _, turn: tokens_of(0, turn // 2, given), wanted, cuts=True)
        for name in names:
            self._calls += 1
            self._commands.receive(wire.CloseSession(self._calls, name))
        self._rest()
        return samples

    def _drive(
        self,
        names: list[str],
        turns: int,
        samples: RoundSamples,
        said: Callable[[int, int], list[int]],
        wanted: int,
        cuts: bool = False,
    ) -> None:
        """Turns of all streams; with `cuts` every other one is aborted after its first tokens."""
        talks = {name: Talk(turns) for name in names}
        calls: dict[int, str] = {}

        def begin(place: int, name: str) -> None:
            talk = talks[name]
            self._calls += 1
            calls[self._calls] = name
            talk.cut = cuts and talk.turn % 2 == 0
            limit = ABORTED_TOKENS if talk.cut else wanted
            sampling = wire.SamplingFields(max_tokens=limit, ignore_eos=True, temperature=0.0)
            tokens = said(place, talk.turn)
            talk.turn, talk.left, talk.tokens, talk.first, talk.pause = (
                talk.turn + 1,
                talk.left - 1,
                0,
                0.0,
                0.0,
            )
            talk.began = time.perf_counter()
            self._commands.receive(
                wire.StartTurn(self._calls, f"t-{self._calls}", "public", tokens, sampling, session=name)
            )

        places = {name: place for place, name in enumerate(names)}
        for name, place in places.items():
            begin(place, name)
        while calls:
            self._commands.retry()
            if self._loop.active:
                self._loop.step()
            for report in self._commands.take_reports():
                if isinstance(report, wire.Declined):
                    raise RuntimeError(report.message)
                if isinstance(report, wire.Step):
                    self._hear(report, calls, talks, samples, cuts, lambda name: begin(places[name], name))
        self._rest()

    def _hear(
        self,
        step: wire.Step,
        calls: dict[int, str],
        talks: dict[str, Talk],
        samples: RoundSamples,
        cuts: bool,
        begin: Callable[[str], None],
    ) -> None:
        """Take the output of a step; start the next turns of streams whose turn is over."""
        now = time.perf_counter()
        for delta in step.deltas:
            if delta.turn not in calls:
                continue  # It was aborted.
            name = calls[delta.turn]
            talk = talks[name]
            if talk.first:
                talk.pause = max(talk.pause, now - talk.last)
            else:
                talk.first = now
            talk.last, talk.tokens = now, talk.tokens + len(delta.tokens)
            if talk.cut and talk.tokens >= ABORT_AFTER:
                del calls[delta.turn]
                self._commands.receive(wire.EndTurn(delta.turn, None, "the client went away"))
                begin(name)
        for end in step.ends:
            name = calls.pop(end.turn, "")
            if not name:
                continue
            talk = talks[name]
            samples.turns.append(
                TurnSample(talk.first - talk.began, now - talk.began, len(end.tokens), talk.pause, cuts)
            )
            if talk.left:
                begin(name)

    def _rest(self) -> None:
        while self._loop.busy or self._commands.waits:
            self._commands.retry()
            self._loop.step()
            self._commands.take_reports()


def main() -> None:
    """Run the rounds that standard input describes."""
    asked = json.load(sys.stdin)
    described = asked["workload"]
    workload = Workload(**{**described, "rounds": [Round(**each) for each in described["rounds"]]})
    engine = InProcess(sys.argv[1], asked["options"], workload)
    for number, each in enumerate(workload.rounds):
        print(json.dumps(asdict(engine.run(number, each))), flush=True)


if __name__ == "__main__":
    main()
