"""Holdfast beside llama-server by processor time, for machines that other work shares.

    python -m holdfast.bench.cpu.processor MODEL.gguf --llama-server PATH [--streams 1 4 16]
        [--prompts 2000] [--tokens 64] [--rounds 5]

Both run with one thread and answer the same requests over HTTP, in turn. A figure is the processor time of
all processes of a server, from the request to the end of its answer: what one quiet core would take, HTTP
included. Load of others does not count, which in wall-clock time costs a system most that spins while it
waits. Figures are medians, ratios medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from holdfast.bench.beside.systems import Holdfast, LlamaServer
from holdfast.bench.machine import processor_seconds
from holdfast.bench.prompts import prompt
from holdfast.bench.tables import make_table
from holdfast.bench.timing import in_turn, paired_ratio

CONTEXT = 4096
PROMPT = 64
"""Tokens of the prompt of each stream."""


class OneThread(Holdfast):
    """A server whose torch and C kernels have one thread."""

    def command(self) -> list[str]:
        return ["env", "OMP_NUM_THREADS=1", *super().command()]


Server = Holdfast | LlamaServer


@dataclass(frozen=True, slots=True)
class Work:
    """So many streams at once, each with so many tokens in and out."""

    streams: int
    given: int
    wanted: int

    @property
    def title(self) -> str:
        """What is shown of it."""
        if self.wanted == 1:
            return f"first token of a prompt of {self.given}, s"
        return f"{self.streams} streams, tokens/s" if self.streams > 1 else "1 stream, tokens/s"

    def figure(self, seconds: float) -> float:
        """Seconds of a first token; the others in tokens per second of processor time."""
        return seconds if self.wanted == 1 else self.streams * self.wanted / seconds


async def seconds_of(server: Server, work: Work, seed: int) -> float:
    """Processor time of one piece of work."""
    prompts = [prompt(work.given, seed * 100 + row) for row in range(work.streams)]
    begun = processor_seconds(server.process)
    await server.complete(prompts, work.wanted)
    return processor_seconds(server.process) - begun


async def measure(
    servers: dict[str, Server], works: Sequence[Work], rounds: int
) -> dict[Work, dict[str, list[float]]]:
    """Seconds of each piece of work, round by round, after one round to warm up."""
    found: dict[Work, dict[str, list[float]]] = {work: {name: [] for name in servers} for work in works}
    started: list[Server] = []
    try:
        for server in servers.values():
            started.append(server)
            await server.start()
        for number in range(rounds + 1):
            for place, work in enumerate(works):
                for name in in_turn(list(servers), number):
                    seconds = await seconds_of(servers[name], work, number * len(works) + place + 1)
                    if number:
                        found[work][name].append(seconds)
    finally:
        for server in started:
            await server.stop()
    return found


def main() -> None:
    """Measure both and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, nargs="*", default=[2000])
    parser.add_argument("--tokens", type=int, default=64, help="tokens that a stream generates")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    servers: dict[str, Server] = {
        "holdfast": OneThread(str(chosen.model), context=CONTEXT),
        "llama-server": LlamaServer(chosen.llama_server, chosen.model, 1, CONTEXT),
    }
    works = [Work(streams, PROMPT, chosen.tokens) for streams in chosen.streams]
    works += [Work(1, length, 1) for length in chosen.prompts]
    found = asyncio.run(measure(servers, works, chosen.rounds))
    title = f"{chosen.model.name}, one thread"
    table = make_table(
        title, "processor time of all processes", ("work",), (*servers, "speed to llama-server")
    )
    for work, seconds in found.items():
        cells = [
            f"{work.figure(median(each)):.2f} ({work.figure(max(each)):.2f}-{work.figure(min(each)):.2f})"
            for each in seconds.values()
        ]
        ratio = paired_ratio(seconds["llama-server"], seconds["holdfast"])
        table.add_row(work.title, *cells, f"{ratio:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
