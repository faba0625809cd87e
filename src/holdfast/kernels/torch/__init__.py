"""The kernels of `holdfast.kernels` in plain torch: the reference, and the implementation for CPUs."""

from holdfast.kernels.torch.activation import geglu, relu_squared, swiglu, swiglu_clamped
from holdfast.kernels.torch.attention import attend
from holdfast.kernels.torch.conv import causal_conv
from holdfast.kernels.torch.experts import experts
from holdfast.kernels.torch.fp8 import linear_fp8
from holdfast.kernels.torch.gated_delta import gated_delta
from holdfast.kernels.torch.linear import linear, linear_gated
from holdfast.kernels.torch.mamba2 import mamba2_scan
from holdfast.kernels.torch.norm import rms_norm, rms_norm_gated, rms_norm_residual
from holdfast.kernels.torch.quantised import experts_quantised, linear_quantised
from holdfast.kernels.torch.rotary import rotate_and_write, write_kv
from holdfast.kernels.torch.router import route
from holdfast.kernels.torch.sampling import sample_tokens
from holdfast.kernels.torch.states import rest_states, wake_states
from holdfast.kernels.torch.step import change_tables, list_pieces, note_sampled, prepare_step
from holdfast.kernels.torch.units import carry, copy_units, move_units

__all__ = [
    "attend",
    "carry",
    "causal_conv",
    "change_tables",
    "copy_units",
    "experts",
    "experts_quantised",
    "gated_delta",
    "geglu",
    "linear",
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
