"""Greedy and seeded tokens of sessions on the CPU, on the GPU with single launches, and from CUDA graphs.

The sessions are interrupted, rewound, forked and spilled to the host, with the strict audit on.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.bench.loops import Talk, open_loop, open_model
from holdfast.bench.small_models import SMALL_MODELS, saved_small_model
from holdfast.core.layout import Tier
from holdfast.core.turn import KEEP_ALL
from holdfast.engine.loop import EngineLoop
from holdfast.models.model import Model


def conversation(loop: EngineLoop, vocabulary: int) -> list[int]:
    """Turns, an interrupt, a rewind, a fork and spills to the host; returns all generated tokens."""
    said: list[int] = []
    talk = Talk(loop, "one")
    beside = [Talk(loop, f"beside {number}") for number in range(4)]
    for turn in range(3):
        talk.begin([(7 * turn + 3 * i) % vocabulary for i in range(41)], 24)
        for number, other in enumerate(beside):
            other.begin([(number + 5 * i) % vocabulary for i in range(7 + 4 * number)], 8 + 5 * number, 0.8)
        said += talk.finish()
        for other in beside:
            said += other.finish()
    talk.begin([5, 6, 7], 40)
    while len(talk.said) < 9:
        loop.step()
    loop.scheduler.interrupt("one", loop.now(), KEEP_ALL if len(talk.said) < 6 else 6)
    talk.finish()
    talk.begin([11, 12, 13], 16)
    said += talk.finish()
    while loop.scheduler.registry.seals or loop.scheduler.registry.flights:
        loop.step()
    loop.scheduler.fork("one", "two", loop.now(), 2)
    loop.scheduler.rewind("one", 1, loop.now())
    talk.begin([21, 22], 16)
    said += talk.finish()
    for calls_back in (False, True, False):
        while loop.scheduler.registry.seals or loop.scheduler.registry.flights:
            loop.step()
        assert loop.scheduler.spill("one", loop.now(), Tier.HOST)
        for number, other in enumerate(beside):
            other.begin([(number + 3 * i) % vocabulary for i in range(9)], 12, 0.8)
        while not calls_back and loop.scheduler.registry.transits:
            loop.step()
        loop.step()
        talk.begin([31, 32, 33], 16)
        said += talk.finish()
        for other in beside:
            said += other.finish()
    findings = loop.scheduler.audit.census()
    assert not findings, [str(finding) for finding in findings]
    return said


def strict_loop(model: Model, graphs: bool, page_size: int, overlap: bool, rows: int = 8) -> EngineLoop:
    """An engine for a few short sessions that audits after every step."""
    return open_loop(
        model,
        graphs,
        page_size=page_size,
        kv_tokens=2048,
        window_tokens=2048,
        state_slots=48,
        audit="strict",
        overlap=overlap,
        chunk_tokens=16,
        max_running=rows,
        host_memory=16 << 20,
    )


def answers(model: Model, graphs: bool, page_size: int, overlap: bool) -> list[int]:
    """The tokens of the conversation on a strict engine."""
    return conversation(strict_loop(model, graphs, page_size, overlap), 128)


def check_tokens() -> Iterator[tuple[str, bool]]:
    """Each layout, page size and mode, and whether the CPU, the GPU and the GPU's graphs agree."""
    for name in SMALL_MODELS:
        with saved_small_model(name) as path:
            here = open_model(path, "cpu", "float32", dummy=False)
            there = open_model(path, "cuda", "float32", dummy=False)
        for overlap in (False, True):
            for page_size in (1, 16, 64):
                expected = answers(here, False, page_size, overlap)
                for graphs in (False, True):
                    same = answers(there, graphs, page_size, overlap) == expected
                    kind = "graphs" if graphs else "launches"
                    yield f"{name}, page {page_size}, overlap {overlap}, {kind}: {len(expected)} tokens", same
