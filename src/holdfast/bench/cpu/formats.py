"""The matrices of a model in GGUF's formats: a decode step and a prompt by the C kernels.

    python -m holdfast.bench.cpu.formats [--shapes smollm2 llama-1024] [--rows 1 4 16 512] [--rounds 5]

All matrices of a decoder are multiplied one after another, with random codes, attention and norms left out.
A line is one format; BF16, F16 and F32 are not quantised, and *torch* is torch's float32 product. *regrouped*
is how these files were held before the kernels read them: Q4_K with a scale and a minimum in half precision
for each 32 weights, formats of other widths in 8 bits. Each round measures all formats in turn; figures are
medians of one thread's processor time, ratios medians of the rounds' ratios to Q4_1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from torch import Tensor

from holdfast.bench.tables import make_table
from holdfast.bench.timing import in_turn, paired_ratio
from holdfast.kernels.cpu.library import match_threads
from holdfast.kernels.cpu.matrix import PackedMatrix
from holdfast.kernels.cpu.packing import pack_matrix
from holdfast.kernels.quantised import SUPER_BLOCK, Codes, QuantisedWeight

PLAIN = {
    "Q4_1": (Codes.INT4, 32, True),
    "Q8_0": (Codes.INT8, 32, False),
    "IQ4_NL": (Codes.IQ4, 32, False),
}
"""Kind, group and minima of formats with a scale for 32 weights."""

SUPERS = {
    "Q2_K": (Codes.INT2, 16, True),
    "Q3_K": (Codes.INT3, 16, False),
    "Q4_K": (Codes.INT4, 32, True),
    "Q5_K": (Codes.INT5, 32, True),
    "Q6_K": (Codes.INT6, 16, False),
    "IQ4_XS": (Codes.IQ4, 32, False),
}
"""The same of formats with super-blocks of 256, whose rows have to be multiples of that."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


SHAPES = {
    "smollm2": Shape(width=576, inner=1536, heads=9, kv_heads=3, head_dim=64, layers=30),
    "llama-1024": Shape(width=1024, inner=2816, heads=16, kv_heads=4, head_dim=64, layers=12),
    "llama-2048": Shape(width=2048, inner=5632, heads=32, kv_heads=4, head_dim=64, layers=5),
}

MIXTURES = {
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q4_K_M regrouped": ("Q4_1", "Q8_0"),
}
"""Formats of most matrices, and of the value and down projections of every other layer."""

NUMBERS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Formats that are not quantised."""

TORCH = "torch"

SINGLE = ("Q4_1", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q3_K", "Q2_K", *NUMBERS, TORCH)


class DenseMatrix:
    """A float32 weight as torch multiplies it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        self.inputs = inputs
        self._weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs))

    @property
    def bytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ w.T` for x [rows, inputs]."""
        return torch.nn.functional.linear(x, self._weight)


Matrix = PackedMatrix | DenseMatrix


def random_weight(name: str, outputs: int, inputs: int) -> QuantisedWeight | Tensor:
    """Random codes of a format, with scales that keep magnitudes finite."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    if name in NUMBERS:
        return torch.randn(outputs, inputs, generator=generator).to(NUMBERS[name])
    kind, group, minima = (SUPERS | PLAIN)[name]

    def integers(most: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(0, most, (outputs, columns), generator=generator).to(dtype)

    if kind is Codes.INT8:
        codes = integers(256, inputs, torch.uint8).view(torch.int8)
    else:
        codes = integers(256 if kind.bits == 4 else 1 << kind.bits, inputs // kind.in_a_byte, torch.uint8)
    groups = inputs // group
    if name in PLAIN:
        scale = torch.full((outputs, groups), 1e-3, dtype=torch.float16)
        return QuantisedWeight(kind, codes, scale, group, minima=scale if minima else None)
    supers = torch.full((outputs, inputs // SUPER_BLOCK), 1e-5, dtype=torch.float16)
    return QuantisedWeight(
        kind,
        codes,
        integers(16, groups, torch.int8),
        group,
        minima=integers(16, groups, torch.uint8) if minima else None,
        super_scales=supers,
        super_minima=supers if minima else None,
    )


def layer(shape: Shape, most: str, more: str, *, joined: bool) -> list[Matrix]:
    """One layer's matrices; `joined`: query, key and value have one form, that of the value."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    first = more if joined else most
    sizes = (
        ((first, queries, shape.width), (first, keys, shape.width), (more, keys, shape.width)),
        ((most, shape.width, queries),),
        ((most, shape.inner, shape.width), (most, shape.inner, shape.width)),
        ((more, shape.width, shape.inner),),
    )
    if most == TORCH:
        return [DenseMatrix(sum(size[1] for size in parts), parts[0][2]) for parts in sizes]
    return [pack_matrix([random_weight(*size) for size in parts]) for parts in sizes]


def matrices(shape: Shape, name: str) -> list[Matrix]:
    """All matrices of a model in a format, each with memory of its own."""
    found: list[Matrix] = []
    for index in range(shape.layers):
        most, more = MIXTURES.get(name, (name, name))
        found += layer(shape, most, more if index % 2 == 0 else most, joined=name.endswith("regrouped"))
    return found


def seconds_of_step(model: Sequence[Matrix], rows: int) -> float:
    """Processor time of one product of each matrix."""
    inputs = {matrix.inputs: torch.randn(rows, matrix.inputs) for matrix in model}
    begun = time.thread_time()
    for matrix in model:
        matrix(inputs[matrix.inputs])
    return time.thread_time() - begun


def measure(models: dict[str, list[Matrix]], rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step for each format, round by round, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name in in_turn(list(models), number):
            taken = seconds_of_step(models[name], rows)
            if number:
                seconds[name].append(taken)
    return seconds


def report(title: str, shape: Shape, names: Sequence[str], rows: Sequence[int], rounds: int) -> None:
    """Measure a shape and print its table: tokens per second, in brackets the rate of Q4_1 as 1."""
    models = {name: matrices(shape, name) for name in names}
    headings = [f"{count} row{'s' if count > 1 else ''}, tokens/s" for count in rows]
    table = make_table(title, "one thread; in brackets: speed to Q4_1's", ("format",), ("MiB", *headings))
    found = {count: measure(models, count, rounds) for count in rows}
    for name, model in models.items():
        cells = [f"{sum(matrix.bytes for matrix in model) / 2**20:.0f}"]
        for count in rows:
            ratio = paired_ratio(found[count]["Q4_1"], found[count][name])
            cells.append(f"{count / median(found[count][name]):,.1f} ({ratio:.2f})")
        table.add_row(name, *cells)
    Console(width=140).print(table)


def main() -> None:
    """Measure the chosen shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2", "llama-1024"])
    parser.add_argument("--formats", nargs="+", choices=[*SINGLE, *MIXTURES])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 512])
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    match_threads()
    for name in chosen.shapes:
        shape = SHAPES[name]
        fits = all(size % SUPER_BLOCK == 0 for size in (shape.width, shape.inner))
        formats = chosen.formats or [*SINGLE, *MIXTURES]
        known = [each for each in formats if fits or each not in (*SUPERS, "Q4_K_M")]
        report(name, shape, list(dict.fromkeys(["Q4_1", *known])), chosen.rows, chosen.rounds)


if __name__ == "__main__":
    main()
