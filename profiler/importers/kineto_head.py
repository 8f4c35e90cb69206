"""What a Kineto file says beside its events: rank, versions, options, the GPUs it saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spikeprof.profiler import hardware
from spikeprof.profiler.importers.chrome import Head
from spikeprof.profiler.schema import TABLES

_OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """The head, read. ``base_time_ns`` is what the events' times count from (Unix ns; 0 = not stated)."""

    rank: int
    base_time_ns: int
    host: str
    versions: Mapping[str, str]
    options: Mapping[str, str]
    notes: tuple[str, ...]


def read(head: Head) -> HeadFacts:
    """Read the head; whatever is absent or odd in it is unknown, and said so where it matters."""
    info = head.distributed_info if isinstance(head.distributed_info, dict) else {}
    rank = info.get("rank")
    notes: list[str] = []
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < 2**30:
        rank = 0
        notes.append("The file names no rank: it counts as rank 0.")
    options = {name: str(int(value)) for name in _OPTIONS if isinstance(value := getattr(head, name), int)}
    options |= {name: str(info[name]) for name in ("world_size", "backend") if name in info}
    for word, lines in (("errors", head.errors), ("warnings", head.warnings)):
        if isinstance(lines, list) and lines:
            notes.append(f"torch.profiler logged {len(lines)} {word} while recording, the first: {str(lines[0])[:200]}")
    base = head.base_time_ns
    return HeadFacts(
        rank=rank,
        base_time_ns=base if isinstance(base, int) and 0 <= base < 2**62 else 0,
        host=head.host_name if isinstance(head.host_name, str) else "",
        versions=_versions(head),
        options=options,
        notes=tuple(notes),
    )


def _versions(head: Head) -> dict[str, str]:
    """``cuda`` is the runtime's; ``cuda_driver`` the newest CUDA that the driver serves, not the driver's own."""
    found = {
        "torch": _plain(head.torch_version),
        "cuda": cuda_version(head.cuda_runtime_version),
        "cuda_driver": cuda_version(head.cuda_driver_version),
        "libcupti": _plain(head.cupti_version),
        "hip": hip_version(head.hip_runtime_version),
        "hip_driver": hip_version(head.hip_driver_version),
        "roctracer": _plain(head.roctracer_version),
    }
    return {name: version for name, version in found.items() if version}


def _plain(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float) else ""


def _number(value: Any) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        return int(value)
    return value if type(value) is int else 0


def cuda_version(value: Any) -> str:
    """12040 → ``12.4``; empty when unknown."""
    number = _number(value)
    return f"{number // 1000}.{number % 1000 // 10}" if number > 0 else ""


def hip_version(value: Any) -> str:
    """60443483 → ``6.4.43483``; empty when unknown."""
    number = _number(value)
    return f"{number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}" if number > 0 else ""


def devices(head: Head, rank: int, tables: Mapping[str, pa.Table]) -> pa.Table:
    """The devices table: every GPU that the file describes, and those that did work without being described."""
    stated = head.device_properties if isinstance(head.device_properties, list) else []
    numbered = [(p.get("id"), p) for p in stated if isinstance(p, dict)]
    described = {number: p for number, p in numbered if type(number) is int and 0 <= number < 2**31}
    working = [tables[n].column("device").to_numpy() for n in ("kernels", "memory_ops") if n in tables]
    ids = sorted({*described, *(int(d) for d in np.unique(np.concatenate(working)))} if working else described)
    rows = [_device(rank, device, described.get(device, {})) for device in ids]
    return pa.Table.from_pylist(rows, schema=TABLES["devices"].arrow)


def _device(rank: int, device: int, stated: Mapping[str, Any]) -> dict[str, Any]:
    name = stated.get("name") if isinstance(stated.get("name"), str) else ""
    gpu = hardware.lookup(name) if name else None
    peak, cache = (gpu.dram_bytes_per_s, gpu.l2_bytes) if gpu else (None, None)
    return {
        "rank": rank,
        "device": device,
        "process_device": device,
        "uuid": "",
        "name": name,
        "sm_arch": _arch(stated),
        "sm_count": min(_positive(stated, ("numSms",)) or 0, 2**31 - 1) or None,
        "l2_bytes": int(cache.value) if cache else None,
        "mem_bytes": _positive(stated, ("totalGlobalMem",)),
        "mem_peak_bytes_per_s": peak.value if peak else None,
        "peak_source": peak.source if peak else "",
    }


def _arch(stated: Mapping[str, Any]) -> str:
    major, minor = stated.get("computeMajor"), stated.get("computeMinor")
    if not isinstance(major, int) or not isinstance(minor, int):
        return ""
    # AMD's stepping (gfx90a, gfx942) is not in the file. Waves of 64 are AMD's alone.
    return f"gfx{major}{minor}" if stated.get("warpSize") == 64 else f"sm_{major}{minor}"


def _positive(stated: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((stated[n] for n in names if type(stated.get(n)) is int and 0 < stated[n] < 2**63), None)
