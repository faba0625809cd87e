"""Checks of products with quantised weights, and of small quantised checkpoints on both devices."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from holdfast import kernels
from holdfast.kernels import ExpertForm
from holdfast.kernels.quantised import Codes, QuantisedWeight
from holdfast.kernels.torch.quantised import dequantise
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.weights import Placement
from tests.gpu.kernel_checks import Errors, error, normal
from tests.kernels import naive
from tests.models.paged import generate
from tests.models.published import FORMS, publish, publish_gpt_oss
from tests.models.small_published import build, prompt

KINDS = {
    "int4": (Codes.INT4, 128, torch.float16),
    "int4 small groups": (Codes.INT4, 32, torch.bfloat16),
    "mxfp4": (Codes.E2M1, 32, torch.uint8),
    "nvfp4": (Codes.E2M1, 16, torch.bfloat16),
    "int8": (Codes.INT8, None, torch.bfloat16),
    "fp8": (Codes.E4M3, 128, torch.float32),
}


def weight_of(name: str, *shape: int) -> QuantisedWeight:
    """Random codes of a kind; 4-bit integers have zero points and permuted inputs too."""
    kind, group, dtype = KINDS[name]
    *lead, outputs, inputs = shape
    group = inputs if group is None or inputs % group else group
    codes = torch.randint(0, 256, (*lead, outputs, inputs * kind.bits // 8), device="cuda", dtype=torch.uint8)
    if kind is Codes.E4M3:
        codes &= 0xF7
    places = (*lead, outputs, inputs // group)
    if dtype == torch.uint8:
        scales = torch.randint(110, 120, places, device="cuda", dtype=torch.uint8)
    else:
        scales = ((torch.rand(places, device="cuda") + 0.5) * inputs**-0.5).to(dtype)
    zeros = factors = permutation = None
    if name == "int4":
        zeros = torch.randint(0, 17, places, device="cuda", dtype=torch.uint8)
        orders = torch.rand(*lead, inputs, device="cuda").argsort(-1)
        permutation = orders.to(torch.int32)
    if name == "nvfp4":
        factors = torch.rand(*lead, outputs, device="cuda") + 0.5
    codes = codes.view(torch.int8) if kind is Codes.INT8 else codes
    return QuantisedWeight(kind, codes, scales, group, zeros, factors, permutation)


def check_quantised(dtype: torch.dtype) -> Errors:
    """Few tokens by the kernel, many dequantised; then the same from a CUDA graph, bit for bit."""
    for name in KINDS:
        for outputs, inputs in ((4096, 4096), (2880, 2880), (1000, 768)):
            weight = weight_of(name, outputs, inputs)
            dense = dequantise(weight, torch.float32).double()
            for tokens in (1, 5, 16, 40, 64, 100, 300):
                x, bias = normal(dtype, tokens, inputs), normal(dtype, outputs)
                actual = kernels.linear_quantised(x, weight, bias)
                yield error(actual, x.double() @ dense.T + bias.double())
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    again = kernels.linear_quantised(x, weight, bias)
                for _ in range(3):
                    again.fill_(torch.nan)
                    graph.replay()
                    yield float((again != actual).sum())


def check_quantised_experts(dtype: torch.dtype) -> Errors:
    """gpt-oss's shape with fewer experts: gated, clamped, with biases."""
    count, hidden, inner = 8, 2880, 2880
    for name in KINDS:
        w13, w2 = weight_of(name, count, 2 * inner, hidden), weight_of(name, count, hidden, inner)
        bias13, bias2 = normal(dtype, count, 2 * inner), normal(dtype, count, hidden)
        for tokens in (1, 16, 64, 300):
            x = normal(dtype, tokens, hidden)
            ids = torch.rand(tokens, count, device="cuda").argsort(-1)[:, :4].contiguous()
            shares = torch.rand(tokens, 4, device="cuda")
            form = ExpertForm("swiglu_clamped", bias13=bias13, bias2=bias2)
            actual = kernels.experts(x, ids, shares, w13, w2, form)
            expected = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
            for expert in range(count):
                chosen, picks = (ids == expert).nonzero(as_tuple=True)
                up = dequantise(w13.expert(expert), torch.float32).double()
                down = dequantise(w2.expert(expert), torch.float32).double()
                middle = naive.activate(x[chosen].double() @ up.T + bias13[expert].double(), "swiglu_clamped")
                middle = middle.to(dtype).double()
                result = middle @ down.T + bias2[expert].double()
                expected.index_add_(0, chosen, result * shares[chosen, picks].double()[:, None])
            yield error(actual, expected)


def check_published() -> Iterator[tuple[str, bool]]:
    """Greedy tokens of quantised checkpoints: dequantised on the CPU, and in their codes on the GPU."""
    cases = [(model, form) for model in ("llama", "qwen3-moe") for form in FORMS]
    for model, form in [*cases, ("gpt-oss", "mxfp4")]:
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place)
            built = build(model)
            if model == "gpt-oss":
                publish_gpt_oss(built, directory)
            else:
                publish(built, directory, form)
            checkpoint = open_checkpoint(directory)
            here = load_model(checkpoint, Placement(torch.device("cpu"), torch.float32))
            placed = choose_placement(checkpoint, torch.device("cuda"), "float32")
            there = load_model(checkpoint, placed)
            tokens = [
                generate(each, [prompt()], page_size=16, chunk=100, count=16)[1] for each in (here, there)
            ]
            yield f"{model} in {form}", tokens[0] == tokens[1]
