"""A load of agents on servers that are started for it, one after the other: Holdfast, then llama-server.

Each has room for the same number of whole sessions in the memory of its cache; what each does with the
others is its own affair. Both get the same texts over HTTP: through the chat interface, and Holdfast through
its sessions too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from holdfast.bench.agents.drive import Figure, Told, measure
from holdfast.bench.agents.workload import AgentLoad
from holdfast.bench.beside.systems import Holdfast, LlamaServer
from holdfast.bench.models import BenchModel
from holdfast.client import Client

__all__ = ["context_of", "measure_beside"]

TURN_TOKENS = 16
"""Tokens of a turn that are neither words nor its answer: the template's."""
TOKENS_OF_WORDS = 1.25
CONTEXT_STEP = 256

Shown = Callable[[str], AbstractContextManager[Told]]
"""Shows the progress of a system by its name."""


def context_of(load: AgentLoad) -> int:
    """The tokens that the longest conversation of a load may have."""
    turns = load.turns + load.fork_turns
    longest = (load.input_tokens + load.output_tokens) * turns / load.turns * TOKENS_OF_WORDS
    return CONTEXT_STEP * (1 + round(longest + turns * TURN_TOKENS) // CONTEXT_STEP)


def measure_beside(
    model: BenchModel, llama_server: Path | None, load: AgentLoad, fit: int, threads: int, shown: Shown
) -> list[Figure]:
    """Run a load on Holdfast and, if its path is given, on llama-server; `fit` whole sessions fit in each.

    Raises `BenchError`.
    """
    context = context_of(load)
    ours = Holdfast(str(model.path), options=model.arguments(), context=context, slots=fit)
    runs: list[tuple[Holdfast | LlamaServer, tuple[str, ...]]] = [(ours, ("sessions", "chat"))]
    if llama_server is not None:
        runs.append((LlamaServer(llama_server, model.path, threads, context, fit), ("chat",)))
    figures: list[Figure] = []
    for system, apis in runs:
        with _started(system):
            with Client(system.url) as client:
                served = client.models()[0]
            for api in apis:
                name = f"{system.name} {api}"
                with shown(name) as told:
                    found = measure(system.url, api, served, None, load, told)
                figures += [{**figure, "system": name, "fit": fit, "context": context} for figure in found]
    return figures


@contextmanager
def _started(system: Holdfast | LlamaServer) -> Iterator[None]:
    try:
        asyncio.run(system.start())
        yield
    finally:
        asyncio.run(system.stop())
