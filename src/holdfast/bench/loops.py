"""An engine loop without a tokenizer, and sessions that a benchmark drives step by step.

Used by `gpu`, by `cpu.host_step` and by the checks in `tests/gpu`; runs without the web packages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.core.events import Event, EventKind
from holdfast.core.turn import Turn
from holdfast.engine.draft.opening import with_memory
from holdfast.engine.listeners import Refusal, TurnListener
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.assembly import build_loop
from holdfast.engine.step.executor import Executor
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.turns.spec import TurnSpec
from holdfast.engine.verbs import Verbs
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.generation import GenerationDefaults
from holdfast.models.heads import DraftHead
from holdfast.models.model import Model

__all__ = ["Talk", "capture_graphs", "open_loop", "open_model"]


class NoTokenizer:
    """Takes the place of a tokenizer: tokens have no text."""

    eos_tokens: tuple[int, ...] = ()
    template = None

    def detokenizer(self, **_: bool) -> NoTokenizer:
        """The detokenizer of a turn."""
        return self

    def add(self, _: list[int]) -> str:
        """The text of some tokens."""
        return ""

    def finish(self) -> str:
        """The text that is left at the end."""
        return ""


def open_model(path: Path, device: str, dtype: str, dummy: bool) -> Model:
    """Load a model directory, with random weights if `dummy`."""
    checkpoint = open_checkpoint(path)
    placement = choose_placement(checkpoint, torch.device(device), dtype)
    return load_model(checkpoint, placement, load_format="dummy" if dummy else "auto")


def open_loop(
    model: Model, graphs: bool, head: Callable[[Model], DraftHead] | None = None, **options: Any
) -> EngineLoop:
    """An engine loop over a model; with `graphs` its CUDA graphs are captured. `head` makes a draft head."""
    chosen, tokenizer = make_options(device=model.device.type, **options), NoTokenizer()
    draft = None if head is None else with_memory(head(model), chosen, tokenizer)  # type: ignore[arg-type]
    loop = build_loop(model, tokenizer, GenerationDefaults(), chosen, runner=draft)  # type: ignore[arg-type]
    if graphs:
        capture_graphs(loop)
    return loop


def capture_graphs(loop: EngineLoop) -> None:
    """Capture the CUDA graphs of a loop's steps."""
    assert isinstance(loop.executor, Executor)
    loop.executor.capture()


class Talk(TurnListener):
    """One session, driven turn by turn."""

    turn: Turn | None = None

    def __init__(self, loop: EngineLoop, name: str, opened: bool = False) -> None:
        self.loop = loop
        self.verbs = Verbs(loop)
        self.name = name
        self.turns = 0
        self.said: list[int] = []
        self.first: float | None = None
        self.over = False
        if not opened:
            loop.scheduler.open(name, "bench", loop.now())

    def begin(self, tokens: list[int], count: int, temperature: float = 0.0) -> None:
        """Submit a turn of these input tokens that generates `count`."""
        self.turns += 1
        self.said, self.first, self.over = [], None, False
        sampling = Sampling(max_tokens=count, temperature=temperature, seed=11, ignore_eos=True)
        spec = TurnSpec(f"{self.name}.{self.turns}", "bench", tokens, sampling, self.name)
        self.verbs.submit(self, spec)

    def begun(self, turn: Turn, stream: TurnStream) -> None:  # noqa: ARG002
        """Keep the turn."""
        self.turn = turn

    def refused(self, refusal: Refusal) -> None:
        """Fail: a benchmark's turns are all valid."""
        raise refusal

    def hear(self, event: Event) -> None:
        """Listen to the events of the turn."""
        if event.kind is EventKind.TOKENS:
            self.said += event.tokens
            self.first = self.first if self.first is not None else time.perf_counter()
        else:
            self.over = True

    def finish(self) -> list[int]:
        """Step until the turn has ended; returns its tokens."""
        while not self.over:
            self.loop.step()
        return self.said
