"""A load of agents on engines and servers that are started for it, one after the other.

Holdfast's engine in process, if asked for; Holdfast's server through its sessions and through the chat
interface; llama-server through the latter. Each has room for the same number of whole sessions in the memory
of its cache; what each does with the others is its own affair. All get the same texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.bench.agents.drive import Figure, Told, measure
from holdfast.bench.agents.inside import INSIDE, measure_inside
from holdfast.bench.agents.workload import AgentLoad
from holdfast.bench.beside.http import BenchError, ask
from holdfast.bench.beside.systems import Holdfast, LlamaServer
from holdfast.bench.models import BenchModel
from holdfast.client import Client
from holdfast.engine.start.pull import ECHO_MODELS
from holdfast.engine.start.tuning import CHECKPOINTS

__all__ = ["AUTO", "Beside", "context_of", "measure_beside", "sized"]

TURN_TOKENS = 16
"""Tokens of a turn that are neither words nor its answer: the template's."""
TOKENS_OF_WORDS, LETTERS_OF_WORDS = 1.25, 7.0
"""Tokens of a word: of common vocabularies, and of the echo models, whose tokens are letters."""
CONTEXT_STEP = 256
SLOTS_PER_SESSION = 2 + CHECKPOINTS
"""Recurrent states of a whole session: two of a running turn, and its checkpoints."""
AUTO = "auto"

Shown = Callable[[str], AbstractContextManager[Told]]
"""Shows the progress of a system by its name."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What is started: the model, the engine's options, and the ways to measure it.

    `api` is `sessions`, `chat`, or `auto` for both. `arguments` are the options as `serve` takes them.
    """

    model: BenchModel
    options: Mapping[str, Any]
    arguments: Sequence[str]
    api: str = AUTO
    in_process: bool = False
    over_http: bool = True
    llama_server: Path | None = None
    threads: int = 1


def context_of(load: AgentLoad, model: str = "") -> int:
    """The tokens that the longest conversation of a load may have."""
    turns = load.turns + load.fork_turns
    each = LETTERS_OF_WORDS if model in ECHO_MODELS else TOKENS_OF_WORDS
    longest = (load.input_tokens * each + load.output_tokens) * turns / load.turns
    return CONTEXT_STEP * (1 + round(longest + turns * TURN_TOKENS) // CONTEXT_STEP)


def sized(model: str, stated: Mapping[str, Any], load: AgentLoad, fit: int) -> dict[str, Any]:
    """Engine options for a load: those that are stated, and room for `fit` whole sessions."""
    context = stated.get("context_length", context_of(load, model))
    return {
        "context_length": context,
        "session_tokens": context,
        "kv_tokens": fit * context,
        "state_slots": fit * SLOTS_PER_SESSION,
        **stated,
    }


def measure_beside(asked: Beside, load: AgentLoad, fit: int, shown: Shown) -> list[Figure]:
    """Run a load on each of the systems. Raises `BenchError`."""
    figures: list[Figure] = []
    options, path = asked.options, asked.model.path
    common = {"kv_tokens": options["kv_tokens"], "context": options["context_length"]}
    if asked.in_process:
        with shown(INSIDE) as told:
            found = measure_inside(str(path), {**asked.model.options(), **options}, load, told)
        figures += [{**figure, **common} for figure in found]
    systems: list[Holdfast | LlamaServer] = []
    if asked.over_http:
        arguments = (*asked.model.arguments(), *asked.arguments)
        systems.append(Holdfast(str(path), options=arguments, context=options["context_length"], slots=fit))
    if asked.llama_server is not None:
        context = options["context_length"]
        systems.append(LlamaServer(asked.llama_server, path, asked.threads, context, fit))
    for system in systems:
        with _started(system):
            figures += [{**figure, **common} for figure in _measure_server(system, asked.api, load, shown)]
    return figures


def _measure_server(
    system: Holdfast | LlamaServer, api: str, load: AgentLoad, shown: Shown
) -> Iterator[Figure]:
    """The figures of a server that runs, through each of its interfaces."""
    with Client(system.url) as client:
        served = client.models()[0]
    bare = False
    apis: tuple[str, ...] = ("chat",)
    if isinstance(system, Holdfast):
        bare = asyncio.run(ask(system.port, "GET", "/tokenizer_info"))["chat_template"] is None
        if bare and api == "chat":
            raise BenchError("the model has no chat template: measure --api sessions")
        apis = (api,) if api != AUTO else ("sessions",) if bare else ("sessions", "chat")
    for name in apis:
        shown_name = f"{system.name} {name}"
        with shown(shown_name) as told:
            found = measure(system.url, name, served, None, load, told, bare)
        yield from ({**figure, "system": shown_name} for figure in found)


@contextmanager
def _started(system: Holdfast | LlamaServer) -> Iterator[None]:
    try:
        asyncio.run(system.start())
        yield
    finally:
        asyncio.run(system.stop())
