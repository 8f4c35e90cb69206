"""Faults of libcupti versions that touch numbers in our reports, from NVIDIA's release notes.

Only faults that can make a recorded number wrong or leave records out; crashes and new features are not here.
Versions are those of ``cuptiGetVersion``: since CUDA 13.0, major * 10000 + minor * 100 + update (130001 is
13.0 Update 1); before that a small running number (26 came with CUDA 12.8).
"""

from __future__ import annotations

from dataclasses import dataclass

_FORUM = "https://forums.developer.nvidia.com/t/cuda-profiler-tools-interface-cupti"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``since`` 0 = it is not known which version brought it."""

    since: int
    fixed_in: int
    what: str
    touches: str  # which of our numbers
    source: str
    after_pause: bool = False  # only once recording was switched off and on again in a process


FAULTS: tuple[Fault, ...] = (
    Fault(
        130000,
        130001,
        "No synchronization records for cudaDeviceSynchronize and cuCtxSynchronize.",
        "the table syncs (host waits are taken from the calls themselves, which are recorded)",
        f"{_FORUM}-13-0-is-now-available/341320 (resolved in CUDA 13.0 Update 1)",
    ),
    Fault(
        0,
        130101,
        "Wrong correlation ids of cudaGraphLaunch and its kernels in profiling sessions after the first.",
        "origin of graph kernels and classes of idle time after recording was switched off and on",
        "https://docs.nvidia.com/cupti/release-notes/release-notes.html (resolved in CUDA 13.1 Update 1)",
        after_pause=True,
    ),
    Fault(
        0,
        130401,
        "Stale kernel names in activity records after modules were reloaded.",
        "kernel names in programs that unload and reload modules while they run",
        f"{_FORUM}-13-4-is-now-available/383026 (resolved in CUDA 13.4 Update 1)",
    ),
    Fault(
        0,
        130401,
        "CPU use of activity tracing grows without bound in long recordings.",
        "time of traced steps and idle time of the host, the later in a long recording the more",
        f"{_FORUM}-13-4-is-now-available/383026 (resolved in CUDA 13.4 Update 1)",
    ),
)


def version_number(text: str) -> int | None:
    """A recorded version as a number: ``130001`` as it is, ``13.0.85`` as 130000 (it does not tell the update).

    None when it is neither form.
    """
    text = text.strip()
    if text.isdecimal():
        return int(text)
    pieces = text.split(".")
    if len(pieces) >= 2 and all(piece.isdecimal() for piece in pieces[:2]):
        major, minor = int(pieces[0]), int(pieces[1])
        return major * 10_000 + minor * 100
    return None


def known_faults(version: str) -> tuple[Fault, ...]:
    """The faults of one libcupti version; empty for a version that cannot be read."""
    number = version_number(version)
    if number is None:
        return ()
    return tuple(fault for fault in FAULTS if fault.since <= number < fault.fixed_in)
