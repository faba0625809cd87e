"""What the type of memory costs in quality: KL divergence and top-1 agreement beside a float32 memory.

    python -m holdfast.bench.cpu.kv_quality [--tokens 512] [--text FILE] [--small]

The default model reads a text (default: the docstrings of this package) and small random models of each
memory layout read random tokens, in float32 on the CPU, so that the type of the KV cache is the only
difference. The last table reads in turns: recurrent states rest in eight bits after each. KL is in nats per
token, over the next token's distribution; `--small` leaves the default model out.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

import holdfast
from holdfast import kernels
from holdfast.bench.loops import open_model
from holdfast.bench.small_models import SMALL_MODELS, saved_small_model
from holdfast.bench.tables import make_table
from holdfast.engine.start.pull import pull
from holdfast.engine.text.tokenizer import open_tokenizer
from holdfast.kernels import build_batch
from holdfast.models.checkpoint import open_checkpoint
from holdfast.models.memory import FP8, Memory, MemoryTypes, UnitCounts
from holdfast.models.model import Model

PAGE = 16
SLICE = 128
"""Tokens whose logits are computed at a time."""
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": FP8}
TURNS = (2, 8, 32)


class Quality(NamedTuple):
    """Mean and 99th percentile of the KL divergence, and the share of equal most likely tokens."""

    kl: float
    kl_99: float
    top_1: float


class Reading:
    """One sequence of a model over a memory of its own."""

    def __init__(self, model: Model, length: int, types: MemoryTypes) -> None:
        self._model, self._read = model, 0
        self._units = list(range(-(-length // PAGE)))
        pages, shape = len(self._units), model.memory_shape
        self.memory: Memory = model.memory(UnitCounts(pages, pages, 1, 1), PAGE, types)
        self._full = [self._units] if shape.full is not None else None
        self._window = [self._units] if shape.window is not None else None

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Log-probabilities [tokens, vocabulary] of what may follow each token."""
        batch = build_batch(
            [tokens], [self._read], full_units=self._full, full_page_size=PAGE, window_units=self._window,
            window_page_size=PAGE, state_source=[0 if self._read else -1], state_destination=[0],
        )  # fmt: skip
        self._read += len(tokens)
        hidden = self._model.forward(batch, self.memory)
        parts = [self._model.logits(part).float().log_softmax(-1) for part in hidden.split(SLICE)]
        return torch.cat(parts)

    def rest(self) -> None:
        """Put the recurrent state to rest in eight bits, and wake it."""
        running = self.memory.recurrent
        assert running is not None, "the model has recurrent states"
        codes, one = torch.empty_like(running, dtype=torch.int8), torch.zeros(1, dtype=torch.int64)
        scales = torch.empty(running.shape[:-1])
        kernels.rest_states(running, one, codes, scales, one)
        kernels.wake_states(codes, scales, one, running, one)


def compare(right: Tensor, found: Tensor) -> Quality:
    """The quality of log-probabilities beside the right ones."""
    kl = (right.exp() * (right - found)).sum(-1)
    same = (right.argmax(-1) == found.argmax(-1)).float().mean()
    return Quality(float(kl.mean()), float(kl.quantile(0.99)), float(same))


def kv_quality(model: Model, tokens: Sequence[int]) -> dict[str, Quality]:
    """The quality of each type of KV cache."""

    def read(kv: torch.dtype) -> Tensor:
        return Reading(model, len(tokens), MemoryTypes(model.dtype, kv)).read(tokens)

    right = read(torch.float32)
    return {name: compare(right, read(kv)) for name, kv in TYPES.items()}


def state_quality(model: Model, tokens: Sequence[int], turns: int) -> Quality:
    """The quality of states that rest in eight bits after each of some turns, beside states that do not."""
    size = -(-len(tokens) // turns)
    right, found = (Reading(model, len(tokens), MemoryTypes.of(model.dtype)) for _ in range(2))
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for begin in range(0, len(tokens), size):
        parts[0].append(right.read(tokens[begin : begin + size]))
        parts[1].append(found.read(tokens[begin : begin + size]))
        found.rest()
    return compare(torch.cat(parts[0]), torch.cat(parts[1]))


def docstrings() -> str:
    """The docstrings of this package's modules, as a text in English."""
    files = sorted(Path(holdfast.__file__).parent.rglob("*.py"))
    found = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) for file in files)
    return "\n\n".join(text for text in found if text)


def rows_of(name: str, qualities: dict[str, Quality]) -> list[list[str]]:
    """The rows of a table."""
    return [
        [name, kind, f"{each.kl:.2e}", f"{each.kl_99:.2e}", f"{100 * each.top_1:.1f} %"]
        for kind, each in qualities.items()
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="length of the text")
    parser.add_argument("--text", type=Path, help="a text in English for the default model")
    parser.add_argument("--small", action="store_true", help="small random models alone")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    if not arguments.small:
        path = pull("smollm2")
        text = arguments.text.read_text(encoding="utf-8") if arguments.text else docstrings()
        tokens = open_tokenizer(open_checkpoint(path)).encode(text)[: arguments.tokens]
        rows += rows_of("smollm2", kv_quality(open_model(path, "cpu", "float32", dummy=False), tokens))
    states: list[list[str]] = []
    for name in SMALL_MODELS:
        with saved_small_model(name) as directory:
            model = open_model(directory, "cpu", "float32", dummy=False)
        generator = torch.Generator().manual_seed(5)
        length = min(arguments.tokens, model.context_length)
        tokens = torch.randint(0, model.config.vocabulary, (length,), generator=generator).tolist()
        rows += rows_of(f"random, {name}", kv_quality(model, tokens))
        if model.memory_shape.state is not None:
            found = {f"int8, {turns} turns": state_quality(model, tokens, turns) for turns in TURNS}
            states += rows_of(f"random, {name}", found)
    console = Console()
    for title, lines in (("KV cache beside float32", rows), ("states at rest beside float32", states)):
        table = make_table(title, None, ("model", "type"), ("KL, mean", "KL, p99", "same top-1"))
        for line in lines:
            table.add_row(*line)
        console.print(table)


if __name__ == "__main__":
    main()
