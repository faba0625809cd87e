"""A mixture of experts on a CPU: weights as stored by the C kernels beside float32 copies in torch.

    python -m holdfast.bench.cpu.experts [--experts 32] [--picks 4] [--width 1024] [--inner 1024]
        [--tokens 1 4 16 512] [--rounds 7]

One layer's experts with random weights and routes, larger than the caches. Each round measures all forms in
turn; figures are medians of one thread's processor time, ratios medians of the rounds' ratios to torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from rich.console import Console
from torch import Tensor

from holdfast import kernels
from holdfast.bench.tables import make_table
from holdfast.bench.timing import in_turn, paired_ratio
from holdfast.kernels.cpu.experts import PackedExperts
from holdfast.kernels.cpu.library import match_threads
from holdfast.kernels.cpu.packing import pack_matrix

TORCH = "float32 in torch"
DTYPES = {"bfloat16 in C": torch.bfloat16, "float16 in C": torch.float16, "float32 in C": torch.float32}

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def products(experts: int, width: int, inner: int) -> tuple[dict[str, Product], dict[str, int]]:
    """The mixture in each form, and its bytes."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(experts, 2 * inner, width, generator=generator) * width**-0.5
    second = torch.randn(experts, width, inner, generator=generator) * inner**-0.5
    found: dict[str, Product] = {TORCH: partial(_by_torch, first, second)}
    sizes = {TORCH: first.nbytes + second.nbytes}
    for name, dtype in DTYPES.items():
        sides = [[pack_matrix([weight.to(dtype)]) for weight in side] for side in (first, second)]
        found[name] = PackedExperts(sides[0], sides[1])
        sizes[name] = sum(matrix.bytes for side in sides for matrix in side)
    return found, sizes


def _by_torch(first: Tensor, second: Tensor, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    return kernels.experts(x, ids, shares, first, second)


def measure(
    forms: dict[str, Product], given: tuple[Tensor, Tensor, Tensor], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each form, round by round, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name in in_turn(list(forms), number):
            begun = time.thread_time()
            forms[name](*given)
            if number:
                seconds[name].append(time.thread_time() - begun)
    return seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--picks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 512])
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    match_threads()
    forms, sizes = products(chosen.experts, chosen.width, chosen.inner)
    generator = torch.Generator().manual_seed(1)
    found: dict[int, dict[str, list[float]]] = {}
    for tokens in chosen.tokens:
        x = torch.randn(tokens, chosen.width, generator=generator)
        ids = torch.rand(tokens, chosen.experts, generator=generator).topk(chosen.picks).indices
        shares = torch.rand(tokens, chosen.picks, generator=generator)
        found[tokens] = measure(forms, (x, ids, shares), chosen.rounds)
    headings = [f"{tokens} token{'s' if tokens > 1 else ''}, ms" for tokens in chosen.tokens]
    title = f"{chosen.experts} experts of {chosen.width} x {chosen.inner}, {chosen.picks} a token"
    table = make_table(title, "one thread; in brackets: speed to torch's", ("form",), ("MiB", *headings))
    for name in forms:
        cells = [f"{sizes[name] / 2**20:.0f}"]
        for tokens in chosen.tokens:
            ratio = paired_ratio(found[tokens][TORCH], found[tokens][name])
            cells.append(f"{1e3 * median(found[tokens][name]):,.2f} ({ratio:.2f})")
        table.add_row(name, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
