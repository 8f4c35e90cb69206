"""KV caches behind one protocol: contiguous or in pages, plain or quantised."""

from spikeprof.kernels.cache.make import make_cache
from spikeprof.kernels.cache.pages import Pages, Quantised
from spikeprof.kernels.cache.protocol import CacheFull, KVCache, Plan
from spikeprof.kernels.cache.quant import dequantise, quantise
from spikeprof.kernels.cache.usage import KINDS, Usage, bytes_per_token

__all__ = [
    "KINDS",
    "CacheFull",
    "KVCache",
    "Pages",
    "Plan",
    "Quantised",
    "Usage",
    "bytes_per_token",
    "dequantise",
    "make_cache",
    "quantise",
]
