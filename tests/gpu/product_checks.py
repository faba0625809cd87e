"""Checks of matrix products with weights in 16, 12 and 8 bits, one by one and in chains."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from holdfast import kernels
from holdfast.kernels.torch.fp8 import dequantise
from holdfast.kernels.triton.fp8 import GROUP, LARGEST, rounds
from tests.gpu.kernel_checks import Errors, error, normal
from tests.kernels import naive
from tests.kernels.batches import NAN


def check_linear(dtype: torch.dtype) -> Errors:
    for tokens in (1, 2, 16, 40, 64, 100, 192, 200):
        for outputs, inputs in (
            (6144, 4096),
            (4096, 12288),
            (2880, 2880),
            (100, 704),
            (1, 704),
            (18560, 2048),
            (24576, 4096),
        ):
            x, weight, bias = (
                normal(dtype, tokens, inputs + 8)[:, :inputs],
                normal(dtype, outputs, inputs) * inputs**-0.5,
                normal(dtype, outputs),
            )
            expected = x.double() @ weight.double().T + bias.double()
            yield error(kernels.linear(x, weight, bias), expected)
            out = torch.full((tokens, outputs), NAN, dtype=dtype, device="cuda")
            kernels.linear(x, weight, bias, out=out)
            yield error(out, expected)
            if outputs == 1:
                continue
            for activation in ("swiglu", "geglu", "swiglu_clamped", "relu_squared"):
                actual = kernels.linear_gated(x, weight, bias, activation)
                yield error(actual, naive.activate(expected, activation))


def check_twelve(dtype: torch.dtype) -> Errors:
    """Weights in twelve bits against the same ones in sixteen."""
    for outputs, inputs, gated in (
        (16384, 1024, True),
        (17000, 1088, False),
        (21504, 4096, False),
        (151_936, 1024, False),
        (24576, 4096, True),
        (28672, 2048, True),
        (51200, 1024, True),
    ):
        weight, bias = normal(dtype, outputs, inputs) * inputs**-0.5, normal(dtype, outputs)
        twelve = kernels.pack_weight(weight, gated)
        if twelve is None:
            continue  # a type or a device without the kernel
        for tokens in (1, 2, 8, 9, 31, 64, 65, 96, 97):
            x = normal(dtype, tokens, inputs + 8)[:, :inputs]
            expected = x.double() @ weight.double().T + bias.double()
            if not gated:
                yield error(kernels.linear(x, weight, bias, twelve), expected)
                expected = naive.activate(expected, "relu_squared")
                yield error(kernels.linear_gated(x, weight, bias, "relu_squared", twelve), expected)
                continue
            for activation in ("swiglu", "geglu", "swiglu_clamped"):
                actual = kernels.linear_gated(x, weight, bias, activation, twelve)
                yield error(actual, naive.activate(expected, activation))


def check_overlap(dtype: torch.dtype) -> Errors:
    """Kernels that overlap with their predecessor give the same bits as kernels in sequence."""
    width, inner, layers = 4096, 12288, 3

    def weights_of(outputs: int, inputs: int) -> list[torch.Tensor]:
        return [normal(dtype, outputs, inputs) * inputs**-0.5 for _ in range(layers)]

    wide, back = weights_of(6144, width), weights_of(width, width)
    first, second = weights_of(2 * inner, width), weights_of(width, inner)
    scale = normal(dtype, width)
    packed = {
        weight.data_ptr(): kernels.pack_weight(weight, weight.shape[0] == 2 * inner)
        for weight in (*wide, *back, *first, *second)
    }

    def run(x: torch.Tensor, between: Callable[[], object], in_twelve: bool) -> torch.Tensor:
        def copy_of(weight: torch.Tensor) -> kernels.TwelveBits | None:
            return packed[weight.data_ptr()] if in_twelve else None

        for layer in range(layers):
            inside = kernels.linear(x, wide[layer], None, copy_of(wide[layer]))[:, :width]
            between()
            total = kernels.linear(inside, back[layer], None, copy_of(back[layer]))
            between()
            total = kernels.rms_norm(total, scale, 1e-5)
            between()
            total = kernels.linear_gated(total, first[layer], None, "swiglu", copy_of(first[layer]))
            between()
            total = kernels.linear(total, second[layer], None, copy_of(second[layer]))
            between()
            x = kernels.rms_norm(total, scale, 1e-5)
            between()
        return x

    for tokens, in_twelve in product((1, 2, 40, 64, 128, 192), (False, True)):
        x = normal(dtype, tokens, width)
        expected = run(x, torch.cuda.synchronize, in_twelve)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = run(x, lambda: None, in_twelve)
        for _ in range(20):
            actual.fill_(NAN)
            graph.replay()
            yield float((actual != expected).sum())


def in_eight_bits(x: torch.Tensor, group: int) -> torch.Tensor:
    """x rounded to 8 bits with one scale per group."""
    groups = x.double().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST
    return ((groups / scale).to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def check_fp8(dtype: torch.dtype) -> Errors:
    for tokens in (1, 16, 30, 50, 100, 300):
        for outputs, inputs in ((4096, 4096), (1000, 704)):
            codes = normal(torch.float32, outputs, inputs).to(torch.float8_e4m3fn)
            for block in ((GROUP, GROUP), (1, inputs), (outputs, inputs)):
                scales = torch.rand(-(-outputs // block[0]), -(-inputs // block[1]), device="cuda") + 0.5
                x, bias = normal(dtype, tokens, inputs), normal(dtype, outputs)
                weight = dequantise(codes, scales, block).double()
                seen = x.double()
                if rounds(x, codes):
                    seen = in_eight_bits(x, min(inputs, block[1]))
                expected = seen @ weight.T + bias.double()
                yield error(kernels.linear_fp8(x, codes, scales, block, bias), expected)


PRODUCT_CHECKS: dict[str, Callable[[torch.dtype], Errors]] = {
    "linear": check_linear,
    "twelve": check_twelve,
    "overlap": check_overlap,
    "fp8": check_fp8,
}
