"""Sessions for the GPU's benchmarks: how an engine is opened on shapes alone, and how a session is driven.

`check_tokens` compares greedy and seeded tokens of sessions that are interrupted, rewound, forked and moved
to the host: on the CPU, on the GPU with kernels launched one by one, and on the GPU with graphs, with the
strict audit on. Used by `gpu.py` and `gpu_timings.py`.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from benchmarks.gpu_models import small_models
from holdfast.core.layout import Tier
from holdfast.core.turn import KEEP_ALL, TurnRequest
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.fp8 import BLOCK, Fp8Linear, Fp8Weight
from holdfast.models.generation import GenerationDefaults
from holdfast.models.linear import DenseLinear
from holdfast.models.model import Model


class PlainTokens:
    """Stands in for a tokenizer: tokens have no text here."""

    eos_tokens: tuple[int, ...] = ()
    template = None

    def detokenizer(self, **_: bool) -> PlainTokens:
        return self

    def add(self, _: list[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


def open_model(path: Path, device: str, dtype: str, dummy: bool) -> Model:
    checkpoint = open_checkpoint(path)
    placement = choose_placement(checkpoint, torch.device(device), dtype)
    return load_model(checkpoint, placement, load_format="dummy" if dummy else "auto")


def shaped_model(config: dict[str, object]) -> Model:
    """A model of these shapes with dummy weights, in bfloat16 on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return open_model(Path(folder), "cuda", "bfloat16", dummy=True)


def to_fp8(model: Model) -> None:
    """Replace the projections of a model's blocks by ones in 8-bit floating point."""
    for block in model._blocks:
        for name in ("_input", "_output"):
            linear = vars(block.part).get(name)
            if isinstance(linear, DenseLinear):
                rows, depth = linear.weight.shape
                scale = torch.full((-(-rows // BLOCK), -(-depth // BLOCK)), 0.01, device=model.device)
                codes = (linear.weight / 0.01).to(torch.float8_e4m3fn)
                vars(block.part)[name] = Fp8Linear(Fp8Weight.of(codes, scale), linear.bias, model.device)


@contextmanager
def dense_alone(model: Model) -> Iterator[None]:
    """Meanwhile nothing is read in twelve bits."""
    kept = [linear.twelve for linear in model._dense]
    for linear in model._dense:
        linear.twelve = None
    try:
        yield
    finally:
        for linear, twelve in zip(model._dense, kept, strict=True):
            linear.twelve = twelve


def open_loop(model: Model, graphs: bool, **options: object) -> EngineLoop:
    chosen = make_options(device=model.device.type, **options)
    loop = EngineLoop(model, PlainTokens(), GenerationDefaults(), chosen)  # type: ignore[arg-type]
    if graphs:
        loop.executor.capture()
    return loop


class Talk:
    """One session driven to its end, turn by turn."""

    def __init__(self, loop: EngineLoop, name: str, opened: bool = False) -> None:
        self.loop = loop
        self.name = name
        self.turns = 0
        self.said: list[int] = []
        self.first: float | None = None
        self.over = False
        if not opened:
            loop.scheduler.open(name, "bench", loop.now())

    def begin(self, tokens: list[int], count: int, temperature: float = 0.0) -> None:
        self.turns += 1
        self.said, self.first, self.over = [], None, False
        request = TurnRequest(f"{self.name}.{self.turns}", tuple(tokens), count)
        sampling = Sampling(temperature=temperature, seed=11, ignore_eos=True).with_defaults(
            self.loop.defaults
        )
        self.loop.submit(self.name, request, sampling, self.hear)

    def hear(self, event: object) -> None:
        kind, tokens = event.kind, event.tokens  # type: ignore[attr-defined]
        if kind == "tokens":
            self.said += tokens
            self.first = self.first if self.first is not None else time.perf_counter()
        else:
            self.over = True

    def finish(self) -> list[int]:
        while not self.over:
            self.loop.step()
        return self.said


def conversation(loop: EngineLoop, vocabulary: int) -> list[int]:
    """Turns, a barge-in, a rewind, a fork and memory on the host; returns everything that was said."""
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
        assert loop.spill("one", Tier.HOST)
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
    """An engine for a few short sessions that counts everything after every step."""
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
    """What a strict engine says in the conversation."""
    return conversation(strict_loop(model, graphs, page_size, overlap), 128)


def check_tokens() -> Iterator[tuple[str, bool]]:
    """Each layout, page size and mode, and whether the CPU, the GPU and the GPU's graphs agree."""
    for name, config in small_models().items():
        torch.manual_seed(3)
        with tempfile.TemporaryDirectory() as folder:
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            here = open_model(Path(folder), "cpu", "float32", dummy=False)
            there = open_model(Path(folder), "cuda", "float32", dummy=False)
        for overlap in (False, True):
            for page_size in (1, 16, 64):
                expected = answers(here, False, page_size, overlap)
                for graphs in (False, True):
                    same = answers(there, graphs, page_size, overlap) == expected
                    kind = "graphs" if graphs else "launches"
                    yield f"{name}, page {page_size}, overlap {overlap}, {kind}: {len(expected)} tokens", same
