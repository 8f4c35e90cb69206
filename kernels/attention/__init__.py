"""Attention: naive, tiled for prefill, split over the sequence for decode, over contiguous and paged caches."""

from spikeprof.kernels.attention.decode import decode_attention, paged_attention
from spikeprof.kernels.attention.naive import naive_attention, reference_attention
from spikeprof.kernels.attention.softmax import merge_attended
from spikeprof.kernels.attention.tiled import tiled_attention

__all__ = [
    "decode_attention",
    "merge_attended",
    "naive_attention",
    "paged_attention",
    "reference_attention",
    "tiled_attention",
]
