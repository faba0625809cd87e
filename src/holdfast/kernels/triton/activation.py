# mypy: allow-untyped-defs, allow-incomplete-defs
"""Gated and plain activations of MLPs as one Triton kernel; experts use `activation_value` too.

Same functions and results as `kernels/torch/activation.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.torch.activation import DEFAULT_CLAMP, Activation, Clamp
from holdfast.kernels.triton.launch import (
    as_rows,
    ceiling,
    launch_next,
    overlap,
    power_of_two,
    wait_for_inputs,
)


@triton.jit
def activation_value(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """The activation of float32 gate and up; a plain activation ignores up."""
    if ACTIVATION == "relu_squared":
        positive = tl.maximum(gate, 0.0)
        result = positive * positive
    elif ACTIVATION == "swiglu":
        result = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "geglu":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z).
        result = gate * tl.sigmoid(2.0 * inner) * up
    else:
        low = tl.minimum(gate, limit)
        high = tl.minimum(tl.maximum(up, -limit), limit)
        result = low * tl.sigmoid(alpha * low) * (high + 1.0)
    return result


@triton.jit
def _activate(
    x, out, x_stride, width, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(x + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    result = activation_value(gate, up, alpha, limit, ACTIVATION)
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


def activate(x: torch.Tensor, activation: Activation, clamp: Clamp = DEFAULT_CLAMP) -> torch.Tensor:
    flat = as_rows(x)
    gated = activation != "relu_squared"
    width = flat.shape[1] // 2 if gated else flat.shape[1]
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        block = min(2048, power_of_two(width))
        _activate[(flat.shape[0], ceiling(width, block))](
            flat, out, flat.stride(0), width, *clamp, ACTIVATION=activation, GATED=gated, BLOCK=block,
            num_warps=max(1, min(8, block // 256)), **overlap(x),
        )  # fmt: skip
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return activate(gate_up, "swiglu")


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    return activate(gate_up, "geglu")


def swiglu_clamped(
    gate_up: torch.Tensor, *, alpha: float = DEFAULT_CLAMP.alpha, limit: float = DEFAULT_CLAMP.limit
) -> torch.Tensor:
    return activate(gate_up, "swiglu_clamped", Clamp(alpha, limit))


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return activate(x, "relu_squared")
