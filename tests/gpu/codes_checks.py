"""Checks of products with packed weights of 4 and 8 bits, whose kernels are for bfloat16 on Hopper."""

from __future__ import annotations

from dataclasses import replace

import torch

from holdfast import kernels
from holdfast.kernels import ExpertForm
from holdfast.kernels.cuda.codes import expanded, expanded_experts
from holdfast.kernels.cuda.packing import PackedCodes
from holdfast.kernels.quantised import QuantisedWeight
from holdfast.kernels.torch.quantised import dequantise
from tests.gpu.kernel_checks import Errors, error, normal
from tests.gpu.quantised_checks import KINDS, weight_of
from tests.kernels import naive

TOKENS = (1, 5, 8, 9, 16, 17, 32, 40, 64, 100, 300)


def _packed(weight: QuantisedWeight, *, gated: bool = False) -> PackedCodes:
    packed = kernels.pack_codes(weight, gated=gated)
    assert packed is not None
    return packed


def check_codes(dtype: torch.dtype) -> Errors:
    """Few tokens by the kernel, many dequantised, plain and gated; then from a CUDA graph, bit for bit."""
    if dtype != torch.bfloat16:
        return
    for name in KINDS:
        for rows, depth, gated in (
            (4096, 4096, False),
            (2880, 2880, False),
            (1000, 768, False),
            (1536, 2048, True),
        ):
            weight = weight_of(name, rows, depth)
            packed = _packed(weight, gated=gated)
            order = slice(None) if weight.permutation is None else weight.permutation.argsort()
            dense = dequantise(weight, torch.float32).double()
            tiles = -(-packed.outputs // (32 if gated else 64))
            yield error(expanded(packed, 0, tiles)[:, order], dense)
            for tokens in TOKENS:
                x, bias = normal(dtype, tokens, depth), normal(dtype, rows)
                activation: kernels.Activation | None = "swiglu" if gated else None
                actual = kernels.linear_codes(x, packed, bias, activation)
                product = x.double() @ dense.T + bias.double()
                yield error(
                    actual, naive.activate(product.to(dtype).double(), activation) if activation else product
                )
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    again = kernels.linear_codes(x, packed, bias, activation)
                for _ in range(3):
                    again.fill_(torch.nan)
                    graph.replay()
                    yield float((again != actual).sum())


def check_codes_experts(dtype: torch.dtype) -> Errors:
    """gpt-oss's shape with fewer experts: gated, clamped, with biases; and one that is not gated."""
    if dtype != torch.bfloat16:
        return
    count = 8
    for name in KINDS:
        for hidden, inner, activation in ((2880, 2880, "swiglu_clamped"), (512, 832, "relu_squared")):
            wide = 2 * inner if activation != "relu_squared" else inner
            w13, w2 = (
                replace(weight_of(name, count, *shape), permutation=None)
                for shape in ((wide, hidden), (hidden, inner))
            )
            p13, p2 = _packed(w13, gated=wide != inner), _packed(w2)
            up = torch.stack([dequantise(w13.expert(each), torch.float32) for each in range(count)]).double()
            down = torch.stack([dequantise(w2.expert(each), torch.float32) for each in range(count)]).double()
            yield error(expanded_experts(p13, range(2, 5)), up[2:5])
            bias13, bias2 = normal(dtype, count, wide), normal(dtype, count, hidden)
            for tokens in (1, 4, 16, 40, 100, 300):
                x = normal(dtype, tokens, hidden)
                ids = torch.rand(tokens, count, device="cuda").argsort(-1)[:, :4].contiguous()
                shares = torch.rand(tokens, 4, device="cuda")
                form = ExpertForm(activation, bias13=bias13, bias2=bias2)
                actual = kernels.experts(x, ids, shares, p13, p2, form)
                expected = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
                for expert in range(count):
                    chosen, picks = (ids == expert).nonzero(as_tuple=True)
                    middle = x[chosen].double() @ up[expert].T + bias13[expert].double()
                    middle = naive.activate(middle, activation).to(dtype).double()
                    result = middle @ down[expert].T + bias2[expert].double()
                    expected.index_add_(0, chosen, result * shares[chosen, picks].double()[:, None])
                yield error(actual, expected)
