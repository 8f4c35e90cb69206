"""Memory under keys that never repeat, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

_FEED = """
import numpy as np
from spikeprof.analyzers.cache_pierce.detector import Detector
from spikeprof.profiler.lookups import lookups

def peak_mb():
    # Not ru_maxrss: that counts what the process was before exec, a copy of the one that runs the tests.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024

detector, rng = Detector(), np.random.default_rng(1)
def feed(block):
    letters = rng.integers(97, 123, (16384, 10), np.uint8).tobytes().decode()
    words = [letters[10 * i : 10 * i + 10] for i in range(16384)]
    keys = [f"user:{word}" if i % 2 else f"{word[:6]}:{i}" for i, word in enumerate(words)]
    detector.feed(lookups(1e9 + block + np.arange(16384) / 16384, keys, np.zeros(16384, bool)))
for block in range(10):
    feed(block)
before_mb = peak_mb()
for block in range(10, 40):
    feed(block)
print(before_mb, peak_mb() - before_mb, len(detector.snapshot().rows))
"""


def test_memory_stays_where_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", _FEED], capture_output=True, text=True, timeout=200, check=True)
    before_mb, grown_mb, rows_count = map(float, done.stdout.split())
    assert grown_mb < 25  # half a million keys that were never seen: 5 MB of Bloom filters, if they had hit
    assert before_mb + grown_mb < 200
    assert rows_count < 300
