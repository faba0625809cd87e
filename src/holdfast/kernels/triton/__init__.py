"""The kernels of `holdfast.kernels` in Triton, for CUDA devices."""

from holdfast.kernels.triton.activation import geglu, relu_squared, swiglu, swiglu_clamped
from holdfast.kernels.triton.attention import attend
from holdfast.kernels.triton.codes import experts_codes, linear_codes
from holdfast.kernels.triton.conv import causal_conv
from holdfast.kernels.triton.experts import experts
from holdfast.kernels.triton.fp8 import linear_fp8
from holdfast.kernels.triton.gated_delta import gated_delta
from holdfast.kernels.triton.linear import linear, linear_gated
from holdfast.kernels.triton.mamba2 import mamba2_scan
from holdfast.kernels.triton.norm import rms_norm, rms_norm_gated, rms_norm_residual
from holdfast.kernels.triton.quantised import linear_quantised
from holdfast.kernels.triton.quantised_experts import experts_quantised
from holdfast.kernels.triton.rotary import rotate_and_write, write_kv
from holdfast.kernels.triton.router import route
from holdfast.kernels.triton.sampling import sample_tokens
from holdfast.kernels.triton.states import rest_states, wake_states
from holdfast.kernels.triton.step import change_tables, list_pieces, note_sampled, prepare_step
from holdfast.kernels.triton.units import carry, copy_units, move_units

__all__ = [
    "attend",
    "carry",
    "causal_conv",
    "change_tables",
    "copy_units",
    "experts",
    "experts_codes",
    "experts_quantised",
    "gated_delta",
    "geglu",
    "linear",
    "linear_codes",
    "linear_fp8",
    "linear_gated",
    "linear_quantised",
    "list_pieces",
    "mamba2_scan",
    "move_units",
    "note_sampled",
    "prepare_step",
    "relu_squared",
    "rest_states",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_residual",
    "rotate_and_write",
    "route",
    "sample_tokens",
    "swiglu",
    "swiglu_clamped",
    "wake_states",
    "write_kv",
]
