"""Workloads whose bytes and operations are known: what this device reaches at best, and what holds others back.

Each probe does its work once and says how many bytes or operations that took; ``spikeprof.kernels.bench`` takes the
time. Bytes are those that the algorithm needs: what it reads once and writes once, whatever the caches do.
"""

from spikeprof.kernels.probes.copy import stream_copy
from spikeprof.kernels.probes.gather import gather, random_rows
from spikeprof.kernels.probes.gemm import matmul
from spikeprof.kernels.probes.l2 import read_again
from spikeprof.kernels.probes.launch import launch_empty
from spikeprof.kernels.probes.peer import peer_copy, why_no_peer
from spikeprof.kernels.probes.probed import Probed
from spikeprof.kernels.probes.transpose import transpose, why_no_nvrtc

__all__ = [
    "Probed",
    "gather",
    "launch_empty",
    "matmul",
    "peer_copy",
    "random_rows",
    "read_again",
    "stream_copy",
    "transpose",
    "why_no_nvrtc",
    "why_no_peer",
]
