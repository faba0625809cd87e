"""The structures of `source/holdfast_cpu.h` for ctypes, field for field, and its numbers of forms."""

from __future__ import annotations

import ctypes
from enum import IntEnum

_WHOLE, _LONG, _REAL, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Form(IntEnum):
    """The forms of weights, by their numbers in C; most have GGUF's name for it."""

    Q4_0 = 0
    Q4_1 = 1
    Q5_0 = 2
    Q5_1 = 3
    Q8_0 = 4
    E2M1 = 5
    IQ4_NL = 6
    Q2_K = 7
    Q3_K = 8
    Q4_K = 9
    Q5_K = 10
    Q6_K = 11
    IQ4_XS = 12
    BF16 = 13
    F16 = 14
    F32 = 15


class MatrixPartStructure(ctypes.Structure):
    """Some outputs of a matrix that have one form."""

    _fields_ = (("blocks", _POINTER), ("form", _WHOLE), ("panels", _WHOLE))


class MatrixStructure(ctypes.Structure):
    """A matrix."""

    _fields_ = (
        ("parts", _POINTER),
        ("bias", _POINTER),
        ("outputs", _WHOLE),
        ("inputs", _WHOLE),
        ("part_count", _WHOLE),
        ("padding", _WHOLE),
    )


class UnpackedStructure(ctypes.Structure):
    """What is packed into a part of a matrix."""

    _fields_ = (
        ("codes", _POINTER),
        ("scales", _POINTER),
        ("minima", _POINTER),
        ("group_scales", _POINTER),
        ("group_minima", _POINTER),
        ("outputs", _WHOLE),
        ("inputs", _WHOLE),
        ("form", _WHOLE),
        ("padding", _WHOLE),
    )


class ExpertActivation(IntEnum):
    """What is between the two products of an expert, by its number in C."""

    SWIGLU = 0
    GEGLU = 1
    SWIGLU_CLAMPED = 2
    RELU_SQUARED = 3


class ExpertsStructure(ctypes.Structure):
    """The two matrices of each expert."""

    _fields_ = (
        ("inner", _POINTER),
        ("outer", _POINTER),
        ("count", _WHOLE),
        ("activation", _WHOLE),
        ("alpha", _REAL),
        ("limit", _REAL),
    )


class LayerStructure(ctypes.Structure):
    """One decoder layer."""

    _fields_ = (
        ("attention_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("qkv", MatrixStructure),
        ("output", MatrixStructure),
        ("gate_up", MatrixStructure),
        ("down", MatrixStructure),
    )


class DecoderStructure(ctypes.Structure):
    """All layers of a model and its last norm."""

    _fields_ = (
        ("layers", _POINTER),
        ("norm", _POINTER),
        ("cos_sin", _POINTER),
        ("layer_count", _WHOLE),
        ("width", _WHOLE),
        ("inner", _WHOLE),
        ("heads", _WHOLE),
        ("kv_heads", _WHOLE),
        ("head_dim", _WHOLE),
        ("rotary_dim", _WHOLE),
        ("window", _WHOLE),
        ("epsilon", _REAL),
        ("scale", _REAL),
        ("residual_multiplier", _REAL),
        ("padding", _WHOLE),
    )


class PagesStructure(ctypes.Structure):
    """The rows of a step and the addresses of their keys and values."""

    _fields_ = (
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("row_start", _POINTER),
        ("context", _POINTER),
        ("table", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("table_stride", _LONG),
        ("unit_stride", _LONG),
        ("layer_stride", _LONG),
        ("token_stride", _LONG),
        ("rows", _WHOLE),
        ("tokens", _WHOLE),
        ("page_size", _WHOLE),
        ("padding", _WHOLE),
    )


class AttentionStructure(ctypes.Structure):
    """The parameters of one attention call."""

    _fields_ = (
        ("sinks", _POINTER),
        ("scale", _REAL),
        ("softcap", _REAL),
        ("heads", _WHOLE),
        ("kv_heads", _WHOLE),
        ("head_dim", _WHOLE),
        ("window", _WHOLE),
    )


class ChoiceStructure(ctypes.Structure):
    """The sampling parameters of all rows."""

    _fields_ = (
        ("temperature", _POINTER),
        ("top_k", _POINTER),
        ("top_p", _POINTER),
        ("min_p", _POINTER),
        ("seeds", _POINTER),
        ("positions", _POINTER),
    )


class MasksStructure(ctypes.Structure):
    """The token masks of some rows."""

    _fields_ = (
        ("words", _POINTER),
        ("rows", _POINTER),
        ("stride", _LONG),
        ("width", _WHOLE),
        ("padding", _WHOLE),
    )
