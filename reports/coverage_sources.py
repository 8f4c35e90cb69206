"""Where coverage comes from: a trace, a coverage file of ours, an LCOV file of any code."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spikeprof.analyzers.derived.fusion_chains import find_runs
from spikeprof.analyzers.derived.fusion_tables import Kernels, amounts, kernels
from spikeprof.analyzers.derived.intervals import Bools, Ints
from spikeprof.analyzers.fusion_coverage import FusionCoverage
from spikeprof.profiler.errors import InputError
from spikeprof.profiler.trace import Trace
from spikeprof.reports.coverage import MARK, Amount, Coverage, decode

_LCOV_SUFFIXES = (".info", ".lcov")
_LCOV_MOST = 1 << 64  # that counters of 64 bits reach


def read_file(path: Path) -> Coverage | None:
    """The coverage that a file holds; None for a path that is neither a coverage file nor LCOV. Raises InputError."""
    try:
        if path.suffix in _LCOV_SUFFIXES:
            return from_lcov(path.read_text("utf-8", errors="replace"), path.name)
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(MARK)) != MARK:
                    return None
            return decode(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    return None


def of_trace(trace: Trace, name: str) -> Coverage:
    """The fusion coverage of a recording, called ``name`` among the sources."""
    trace = trace.sound()
    if not trace.table("kernels").num_rows:
        return Coverage((name,))
    of = kernels(trace)
    return Coverage((name,), _functions(of), _lines(trace, of), _branches(trace, of), _fusion(of))


def _fusion(of: Kernels) -> dict[str, Amount]:
    everything = np.ones(len(of.work), bool)
    fused, fusible, whole = (amounts(of, which) for which in (of.fused, of.fusible, everything))
    found = {
        "time": Amount(fused.time_ns, fusible.time_ns, whole.time_ns),
        "launches": Amount(fused.launches, fusible.launches, whole.launches),
    }
    limit = FusionCoverage().min_known_share
    if whole.moved_bytes is not None and fusible.known_ns >= limit * fusible.time_ns:
        found["bytes"] = Amount(fused.moved_bytes or 0.0, fusible.moved_bytes or 0.0, whole.moved_bytes)
    return found


def _functions(of: Kernels) -> dict[str, int]:
    """By name of the kernel, its launches; 0 for one that is not fused."""
    found: dict[str, int] = {}
    for name, work, launches in zip(of.of.names, of.work, of.of.launches.tolist(), strict=True):
        if work.is_fusible:
            found[name] = found.get(name, 0) + (launches if work.is_fused else 0)
    return found


def _lines(trace: Trace, of: Kernels) -> dict[str, int]:
    """By line that launched fusible kernels, how many of them are fused; empty where lines were not recorded."""
    if "stacks" not in trace or "origins" not in trace or not (of.owners >= 0).any():
        return {}
    places = trace.table("stacks").select(["file", "line"]).to_pydict()
    stack = trace.column("origins", "stack_id")
    rows = np.flatnonzero((of.owners >= 0) & (of.of.of_kernel >= 0) & _of_kernels(of, of.fusible))
    at = stack[of.owners[rows]]
    known = (at >= 0) & (at < len(places["file"]))
    rows, at = rows[known], at[known]
    hits = np.bincount(at, _of_kernels(of, of.fused)[rows], minlength=len(places["file"]))
    found: dict[str, int] = {}
    for number in np.unique(at).tolist():
        name = f"{places['file'][number]}:{places['line'][number]}"
        found[name] = found.get(name, 0) + int(hits[number])
    return found


def _of_kernels(of: Kernels, which: Bools) -> Bools:
    """Of each kernel, whether its class is chosen."""
    return np.append(which, False)[of.of.of_kernel]


def _branches(trace: Trace, of: Kernels) -> dict[str, int]:
    """Junctions: within fused kernels, one less than their operators, hit by each launch; within chains, never hit."""
    found: dict[str, int] = {}
    for name, work, launches in zip(of.of.names, of.work, of.of.launches.tolist(), strict=True):
        if work.is_fused:
            for number in range(1, max(len(work.operators), 2)):
                key = f"{name} #{number}"
                found[key] = found.get(key, 0) + launches
    runs = find_runs(trace, of.of, of.work, FusionCoverage().max_gap_ns)
    code = of.of.of_kernel[runs.row]
    inner = np.ones(len(code), bool)
    inner[runs.first] = False
    for first, second in _distinct(code[:-1][inner[1:]], code[1:][inner[1:]]):
        found.setdefault(f"{of.work[first].does} -> {of.work[second].does}", 0)
    return found


def _distinct(first: Ints, second: Ints) -> list[tuple[int, int]]:
    pairs = np.unique(np.stack([first, second]), axis=1)
    return list(zip(*pairs.tolist(), strict=True))


# ---------------------------------------------------------------- LCOV


def from_lcov(text: str, name: str) -> Coverage:
    """What an LCOV tracefile counts (gcov, llvm-cov, coverage.py and others write it). Raises InputError.

    Records: SF (file), FN and FNDA (functions), DA (lines), BRDA (branches); all others are summaries. Functions are
    called ``file:function``, branches ``file:line:block:branch``.
    """
    functions: dict[str, int] = {}
    lines: dict[str, int] = {}
    branches: dict[str, int] = {}
    file = ""
    for number, line in enumerate(text.splitlines(), 1):
        what, _, rest = line.strip().partition(":")
        parts = rest.split(",")
        try:
            if what == "SF":
                file = rest
            elif what == "FN":
                functions.setdefault(f"{file}:{parts[-1]}", 0)
            elif what == "FNDA":
                _add(functions, f"{file}:{','.join(parts[1:])}", parts[0])
            elif what == "DA":
                _add(lines, f"{file}:{int(parts[0])}", parts[1])
            elif what == "BRDA":
                _add(branches, f"{file}:{':'.join(parts[:-1])}", "0" if parts[3] == "-" else parts[3])
        except (ValueError, IndexError, OverflowError) as error:
            raise InputError(f"{name} is no LCOV file: line {number} reads {line[:60]!r}") from error
    if not (functions or lines or branches):
        raise InputError(f"{name} is no LCOV file: it counts nothing")
    return Coverage((name,), functions, lines, branches)


def _add(into: dict[str, int], name: str, hits: str) -> None:
    count = int(float(hits))
    if not 0 <= count < _LCOV_MOST:
        raise ValueError(hits)
    into[name] = into.get(name, 0) + count
