"""A load of agents on an engine in process, without a server: a session each, and forks for sub-agents.

    python -m holdfast.bench.agents.inside MODEL    reads {"options", "load"} from standard input

Prints one line of JSON for each turn as it ends, and at the end the seconds of the load. A process of its
own, so that the device is free for the server that is measured next.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from holdfast.bench.agents.drive import Figure, Told, figures_of, run_agents
from holdfast.bench.agents.workload import AgentLoad
from holdfast.bench.beside.http import BenchError
from holdfast.bench.url.load import Ask, Sample
from holdfast.core.errors import Refused
from holdfast.engine.engine import Engine, Session, TurnFailed
from holdfast.engine.sampling import Sampling

__all__ = ["INSIDE", "InsideAgents", "measure_inside"]

INSIDE = "in process"
IDLE_SECONDS = 0.001
"""How long an engine without work waits for the next input."""


def measure_inside(model: str, options: Mapping[str, Any], load: AgentLoad, told: Told) -> list[Figure]:
    """Run a load in a child process and return its figures."""
    samples: list[Sample] = []
    seconds = 0.0
    command = [sys.executable, "-m", "holdfast.bench.agents.inside", model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None, "both are pipes"
        child.stdin.write(json.dumps({"options": dict(options), "load": asdict(load)}))
        child.stdin.close()
        for line in child.stdout:
            read = json.loads(line)
            if "seconds" in read:
                seconds = read["seconds"]
                continue
            samples.append(Sample(**read))
            told(samples[-1])
    if child.returncode:
        raise BenchError(f"the engine in process ended with status {child.returncode}")
    return figures_of(samples, seconds, load, model, INSIDE)


class InsideAgents:
    """Agents on an engine of this process, which one task drives while the agents wait for their turns."""

    name = INSIDE

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.bare = engine.loop.setup.tokenizer.template is None
        self._driving = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        while True:
            if self._engine.loop.busy:
                self._engine.drive()
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(IDLE_SECONDS)

    async def open(self, system: str | None) -> InsideTalk:
        """Open a session."""
        return InsideTalk(self._engine.session(system))

    async def close(self) -> None:
        """Stop driving the engine."""
        self._driving.cancel()
        await asyncio.gather(self._driving, return_exceptions=True)


class InsideTalk:
    """A session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def turn(self, ask: Ask, sample: Sample) -> None:
        """Run a turn and fill in the sample, except for `total`."""
        began = time.perf_counter()
        sampling = Sampling(max_tokens=ask.output_tokens, temperature=0.0, ignore_eos=ask.ignore_eos)
        try:
            turn = self._session.say(ask.words, sampling)
            while not turn.done:
                await asyncio.sleep(0)
                if turn.take():
                    sample.pieces.append(time.perf_counter() - began)
            usage = turn.usage
        except (Refused, TurnFailed) as error:
            sample.error = f"{type(error).__name__}: {error}"
            return
        sample.tokens = usage.completion_tokens
        sample.prompt_tokens = usage.prompt_tokens
        sample.cached_tokens = usage.cached_tokens

    async def fork(self) -> InsideTalk:
        """A conversation that goes on from here."""
        return InsideTalk(self._session.fork())

    async def close(self) -> None:
        """Close the session."""
        self._session.close()


async def _run(model: str, options: Mapping[str, Any], load: AgentLoad) -> float:
    """Run a load, printing its turns; returns its seconds."""
    with Engine(model, **options) as engine:
        api = InsideAgents(engine)
        try:
            _, seconds = await run_agents(
                api, load, lambda sample: print(json.dumps(asdict(sample)), flush=True)
            )
        finally:
            await api.close()
    return seconds


def main() -> None:
    """Run the load that standard input describes."""
    asked = json.load(sys.stdin)
    seconds = asyncio.run(_run(sys.argv[1], asked["options"], AgentLoad(**asked["load"])))
    print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
