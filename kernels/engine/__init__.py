"""A small inference engine: a decoder with paged KV cache, continuous batching, speculative decoding, a request pipe.

from spikeprof.kernels.engine import Engine

engine = Engine("tiny", kv_cache="int8", max_seq_len=8192, device="auto")
engine.generate([1, 2, 3], max_new_tokens=16).tokens
"""

from spikeprof.kernels.engine.batching import Server, Tokens
from spikeprof.kernels.engine.checkpoint import CheckpointError
from spikeprof.kernels.engine.config import PRESETS, ModelConfig
from spikeprof.kernels.engine.engine import Engine, Generated, Streamed
from spikeprof.kernels.engine.marks import mark
from spikeprof.kernels.engine.pipe import Listener, PeerGone, connect
from spikeprof.kernels.engine.sampling import Sampling
from spikeprof.kernels.engine.scheduler import Request
from spikeprof.kernels.engine.speculative import Speculated, Speculative

__all__ = [
    "PRESETS",
    "CheckpointError",
    "Engine",
    "Generated",
    "Listener",
    "ModelConfig",
    "PeerGone",
    "Request",
    "Sampling",
    "Server",
    "Speculated",
    "Speculative",
    "Streamed",
    "Tokens",
    "connect",
    "mark",
]
