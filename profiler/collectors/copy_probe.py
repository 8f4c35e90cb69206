"""Measured bandwidth of copies between GPUs and the host, in a process of its own that may crash or hang.

It takes a CUDA context and a quarter of the free memory at most on every GPU that ``CUDA_VISIBLE_DEVICES`` shows, so
it is only done when asked for. Copies run one at a time, in one direction, from and to pinned host memory.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from spikeprof.profiler.collectors.nvml import Gpu
from spikeprof.profiler.schema import TABLES

SIZE_BYTES = 256 << 20
REPEATS_COUNT = 5
TIMEOUT_SECONDS = 120.0
_PROGRAM = Path(__file__).with_name("copy_child.py")
_HOST = "host"

Ends = tuple[str, str]  # UUIDs of source and destination; "host" for the host


@dataclass(frozen=True, slots=True)
class Copies:
    """What came of the copies. ``reason`` holds for every copy that has neither a rate nor a reason of its own."""

    bytes_per_s: Mapping[Ends, float] = field(default_factory=dict)
    reasons: Mapping[Ends, str] = field(default_factory=dict)
    reason: str = ""


def measure(
    library: str = "libcuda.so.1",
    size_bytes: int = SIZE_BYTES,
    repeats_count: int = REPEATS_COUNT,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Copies:
    """Copy ``size_bytes`` over every link, the median of ``repeats_count`` times. Never raises.

    A copy process that crashes or exceeds ``timeout_seconds`` leaves what it had measured by then.
    """
    options = json.dumps({"library": library, "size_bytes": size_bytes, "repeats_count": repeats_count})
    try:
        # -I: nothing that is meant for the program under test reaches this one.
        child = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM), options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        return Copies(reason=f"the copy process cannot be started: {error.strerror}")
    try:
        output, _ = child.communicate(timeout=timeout_seconds)
        end = _ending(child.returncode)
    except subprocess.TimeoutExpired:
        output, end = _killed(child), f"the copies did not end within {timeout_seconds:g} s"
    return _copies(output, end)


def _killed(child: subprocess.Popen[bytes]) -> bytes:
    """End the process; what it had written. One that is stuck in the driver is left behind."""
    child.kill()
    try:
        return child.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired as stuck:
        return stuck.output or b""


def _ending(code: int) -> str:
    if code == 0:
        return "CUDA shows no such GPU (is CUDA_VISIBLE_DEVICES set?)"
    try:
        how = f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        how = f"exited with {code}"
    return f"the copy process {how}"


def _copies(output: bytes, end: str) -> Copies:
    rates: dict[Ends, float] = {}
    reasons: dict[Ends, str] = {}
    for line in output.splitlines():
        try:
            told: dict[str, Any] = json.loads(line)
        except ValueError:  # cut off as it was written
            continue
        ends = (str(told.get("src", "")), str(told.get("dst", "")))
        if "bytes_per_s" in told:
            rates[ends] = float(told["bytes_per_s"])
        elif all(ends):
            reasons[ends] = str(told["reason"])
        else:
            end = str(told["reason"])
    return Copies(rates, reasons, end)


def with_copies(table: pa.Table, gpus: Sequence[Gpu], copies: Copies) -> pa.Table:
    """The table ``topology`` with what was measured, or why it was not. ``gpus`` give the ordinals their UUIDs."""
    uuids = {gpu.index: gpu.uuid for gpu in gpus}
    rows = table.to_pylist()
    for row in rows:
        ends = (uuids.get(row["src_device"], _HOST), uuids.get(row["dst_device"], _HOST))
        row["measured_bytes_per_s"] = copies.bytes_per_s.get(ends)
        known = row["measured_bytes_per_s"] is not None
        row["measured_reason"] = "" if known else copies.reasons.get(ends, copies.reason)
    return pa.Table.from_pylist(rows, schema=TABLES["topology"].arrow)
