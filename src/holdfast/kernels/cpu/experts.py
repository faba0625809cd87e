"""Mixture of experts by the C kernels: each expert's products run once, over the tokens routed to it.

Same function as `kernels/torch/experts.py`, for weights that are packed matrices. A token's result does not
depend on the other tokens. Built by `models.experts`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.cpu.library import library
from holdfast.kernels.cpu.matrix import PackedMatrix
from holdfast.kernels.cpu.structures import ExpertActivation, ExpertsStructure, MatrixStructure
from holdfast.kernels.torch.activation import PLAIN_EXPERTS, ExpertForm

__all__ = ["PackedExperts"]

_OUT_OF_RANGE = -2


class PackedExperts:
    """The matrices of all experts and their form; `inner` [2 * inner, hidden] has gate rows first."""

    __slots__ = ("_inputs", "_keep", "_library", "_matrices", "_outputs", "_structure")

    def __init__(
        self,
        inner: Sequence[PackedMatrix],
        outer: Sequence[PackedMatrix],
        form: ExpertForm = PLAIN_EXPERTS,
    ) -> None:
        loaded = library()
        assert loaded is not None, "the C kernels are not available"
        assert len(inner) == len(outer) > 0
        halves = 1 if form.activation == "relu_squared" else 2
        shapes = {(first.outputs, first.inputs, second.outputs, second.inputs)
                  for first, second in zip(inner, outer, strict=True)}  # fmt: skip
        ((wide, self._inputs, self._outputs, middle),) = shapes
        assert wide == halves * middle, "the second product takes what the activation leaves"
        biases = [None if bias is None else bias.float().contiguous() for bias in (form.bias13, form.bias2)]
        self._library = loaded
        self._keep = (tuple(inner), tuple(outer), biases)
        self._matrices = tuple(
            _structures(side, bias) for side, bias in zip((inner, outer), biases, strict=True)
        )
        self._structure = ExpertsStructure(
            *(ctypes.addressof(structures) for structures in self._matrices),
            len(inner),
            ExpertActivation[form.activation.upper()].value,
            form.clamp.alpha,
            form.clamp.limit,
        )

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """The weighted sum of the chosen experts; parameters as in `kernels.experts`."""
        assert x.shape[1] == self._inputs and ids.shape == shares.shape == (x.shape[0], ids.shape[1])
        given = x if x.dtype == torch.float32 and x.stride(-1) == 1 else x.float().contiguous()
        ids, shares = ids.to(torch.int64).contiguous(), shares.float().contiguous()
        out = torch.empty((x.shape[0], self._outputs), dtype=torch.float32)
        failed = self._library.hf_experts(
            ctypes.byref(self._structure),
            given.data_ptr(),
            given.stride(0),
            given.shape[0],
            ids.data_ptr(),
            shares.data_ptr(),
            ids.shape[1],
            out.data_ptr(),
        )
        if failed == _OUT_OF_RANGE:
            raise IndexError(f"an expert is out of range: there are {self._structure.count}")
        if failed:
            raise MemoryError(f"no memory for the experts of {x.shape[0]} tokens")
        return out.to(x.dtype)


def _structures(matrices: Sequence[PackedMatrix], bias: Tensor | None) -> ctypes.Array[MatrixStructure]:
    """The structures of all experts' matrices, with the rows of `bias` [experts, outputs]."""
    assert bias is None or bias.shape == (len(matrices), matrices[0].outputs)
    found = (MatrixStructure * len(matrices))(*(matrix.structure for matrix in matrices))
    if bias is not None:
        for structure, row in zip(found, bias, strict=True):
            structure.bias = row.data_ptr()
    return found
