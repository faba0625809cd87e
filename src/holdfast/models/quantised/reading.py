"""One module of a quantised checkpoint, in whichever form it is stored; or a dummy one of that form.

Called by the weight reader.
"""

from __future__ import annotations

import math
import zlib

import torch

from holdfast.kernels.quantised import Codes, QuantisedWeight
from holdfast.models.quantised.floats import read_fp8, read_mxfp4, read_nvfp4
from holdfast.models.quantised.forms import Form, Layout
from holdfast.models.quantised.integers import Parts, read_awq, read_gptq, read_int8, read_packed

_READERS = {
    Layout.PACKED: read_packed,
    Layout.INT8: read_int8,
    Layout.FP8: read_fp8,
    Layout.GPTQ: read_gptq,
    Layout.AWQ: read_awq,
    Layout.MXFP4: read_mxfp4,
    Layout.NVFP4: read_nvfp4,
    Layout.NVFP4_MODELOPT: read_nvfp4,
}


def read_module(parts: Parts, module: str, form: Form, outputs: int, inputs: int) -> QuantisedWeight | None:
    """The weight of a module; None, and recorded, where a tensor of it is missing or wrong."""
    return _READERS[form.layout](parts, module, form, outputs, inputs)


def kind_of(form: Form) -> Codes:
    """The codes of a form."""
    if form.layout in (Layout.PACKED, Layout.GPTQ, Layout.AWQ):
        return Codes.INT4 if form.bits == 4 else Codes.INT8
    if form.layout is Layout.INT8:
        return Codes.INT8
    return Codes.E4M3 if form.layout is Layout.FP8 else Codes.E2M1


_SPREAD = {Codes.INT4: 4.6, Codes.INT8: 73.6, Codes.E2M1: 2.7, Codes.E4M3: 120.0}
"""Standard deviation of random codes."""


def dummy_module(name: str, form: Form, shape: tuple[int, ...], device: torch.device) -> QuantisedWeight:
    """Random codes that depend on the name alone, with scales that keep magnitudes."""
    *lead, outputs, inputs = shape
    kind = kind_of(form)
    group = inputs if form.group is None or inputs % form.group else form.group
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    size = (*lead, outputs, inputs * kind.bits // 8)
    codes = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
    if kind is Codes.E4M3:
        codes &= 0xF7  # never NaN
    scale = 1.0 / (_SPREAD[kind] * math.sqrt(inputs))
    places = (*lead, outputs, inputs // group)
    if form.layout in (Layout.MXFP4, Layout.MXFP4_EXPERTS):
        exponent = 127 + round(math.log2(scale))
        scales = torch.full(places, exponent, dtype=torch.uint8, device=device)
    else:
        dtype = torch.float32 if kind is Codes.E4M3 else torch.bfloat16
        scales = torch.full(places, scale, dtype=dtype, device=device)
    zeros = None
    if kind is Codes.INT4 and not form.symmetric:
        zeros = torch.full(places, 8, dtype=torch.uint8, device=device)
    if kind is Codes.INT8:
        codes = codes.view(torch.int8)
    return QuantisedWeight(kind, codes, scales, group, zeros)
