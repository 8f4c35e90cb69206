"""Kernels that do in one launch what takes several otherwise, each beside its twin of separate operators."""

from spikeprof.kernels.fused.dropout import dropout_mask
from spikeprof.kernels.fused.gelu_dropout import gelu_dropout, gelu_dropout_unfused
from spikeprof.kernels.fused.linear_silu import linear_silu, linear_silu_unfused
from spikeprof.kernels.fused.rms_norm_residual import Normed, rms_norm_residual, rms_norm_residual_unfused
from spikeprof.kernels.fused.rotary import Rotated, rotary, rotary_table, rotary_unfused
from spikeprof.kernels.fused.silu_mul import silu_mul, silu_mul_unfused

__all__ = [
    "Normed",
    "Rotated",
    "dropout_mask",
    "gelu_dropout",
    "gelu_dropout_unfused",
    "linear_silu",
    "linear_silu_unfused",
    "rms_norm_residual",
    "rms_norm_residual_unfused",
    "rotary",
    "rotary_table",
    "rotary_unfused",
    "silu_mul",
    "silu_mul_unfused",
]
