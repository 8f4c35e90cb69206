"""Fusion coverage as code coverage has it: functions, lines and branches with how often each was hit, to be added up.

What is covered is what ran fused. Of a trace, **functions** are the kernels that fusing is about, hit by launches that
are fused; **lines** are the places in Python that launched them, hit likewise; **branches** are the junctions between
two operators, hit where one kernel does both and not where the result went through memory in between. Beside these
stand the sums that coverage by time, launches and bytes is made of, so that shares of several sources are those of
their sums. Other sources (LCOV files of any code) have hits alone.

``register_postprocessor`` adds a function that every merged coverage goes through before it is judged by a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import msgspec

from spikeprof.profiler.errors import ForeignFile, NewerSchema

FORMAT = "spikeprof-coverage"
VERSION = 1

#: What hits are counted of.
COUNTED = ("functions", "lines", "branches")
#: What coverage is stated by.
AMOUNTS = ("time", "launches", "bytes")


@dataclass(frozen=True, slots=True)
class Amount:
    """Time in ns, launches or bytes: of fused kernels, of those that fusing is about, of all."""

    fused: float
    fusible: float
    all: float

    def plus(self, other: Amount) -> Amount:
        """Both together."""
        return Amount(self.fused + other.fused, self.fusible + other.fusible, self.all + other.all)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Hits by name, of one source or of several together. ``fusion``: by ``AMOUNTS``; what is absent is not known."""

    sources: tuple[str, ...] = ()
    functions: Mapping[str, int] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)  # "file:line"
    branches: Mapping[str, int] = field(default_factory=dict)
    fusion: Mapping[str, Amount] = field(default_factory=dict)


class Share(NamedTuple):
    """One measure of a coverage: covered over total; ``value`` None = not measured, with the reason."""

    value: float | None
    covered: float
    total: float
    reason: str = ""


class Postprocessor(Protocol):
    """What ``register_postprocessor`` takes."""

    def __call__(self, coverage: Coverage, /) -> Coverage:
        """The coverage that goes on from here: the one that came, or another."""
        ...


_POSTPROCESSORS: list[Postprocessor] = []


def register_postprocessor(function: Postprocessor) -> Callable[[], None]:
    """Have every merged coverage go through ``function`` before a policy judges it, after those registered earlier.

    It is given a ``Coverage`` and returns one; what it raises is not caught. Returns a function that takes it away.
    """
    _POSTPROCESSORS.append(function)

    def remove() -> None:
        if function in _POSTPROCESSORS:
            _POSTPROCESSORS.remove(function)

    return remove


def merged(found: Iterable[Coverage]) -> Coverage:
    """All of them together: hits and amounts added up, then through what was registered to post-process them.

    An amount that one of those with a fusion coverage lacks is not known of all. Raises TypeError when a registered
    function returns no Coverage.
    """
    whole = Coverage()
    amounts: list[Mapping[str, Amount]] = []
    for one in found:
        whole = Coverage(
            (*whole.sources, *one.sources),
            _added(whole.functions, one.functions),
            _added(whole.lines, one.lines),
            _added(whole.branches, one.branches),
        )
        if one.fusion:
            amounts.append(one.fusion)
    known = [name for name in AMOUNTS if amounts and all(name in one for one in amounts)]
    whole = replace(whole, fusion={name: _sum(one[name] for one in amounts) for name in known})
    for function in tuple(_POSTPROCESSORS):
        whole = function(whole)
        if not isinstance(whole, Coverage):
            raise TypeError(f"{function!r} is to return a Coverage, not a {type(whole).__name__}")
    return whole


def _added(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {**first, **{name: first.get(name, 0) + hits for name, hits in second.items()}}


def _sum(found: Iterable[Amount]) -> Amount:
    total = Amount(0, 0, 0)
    for one in found:
        total = total.plus(one)
    return total


def shares(of: Coverage) -> dict[str, Share]:
    """Every measure by the name that a policy calls it: ``fusion.time``, ``fusion.all.time``, ``functions``, …."""
    found: dict[str, Share] = {}
    for base, prefix in (("fusible", "fusion"), ("all", "fusion.all")):
        for name in AMOUNTS:
            amount = of.fusion.get(name)
            if amount is None:
                why = f"{name} of fused kernels are not known of every trace" if of.fusion else "no source is a trace"
                found[f"{prefix}.{name}"] = Share(None, 0, 0, why)
                continue
            found[f"{prefix}.{name}"] = _share(amount.fused, getattr(amount, base), "no kernel is fusible")
    for what in COUNTED:
        hits: Mapping[str, int] = getattr(of, what)
        found[what] = _share(sum(1 for n in hits.values() if n > 0), len(hits), f"no source names {what}")
    return found


def _share(covered: float, total: float, why_none: str) -> Share:
    return Share(covered / total, covered, total) if total > 0 else Share(None, covered, total, why_none)


# ---------------------------------------------------------------- the file


class _File(msgspec.Struct):
    format: str
    version: int
    sources: tuple[str, ...] = ()
    functions: dict[str, int] = {}
    lines: dict[str, int] = {}
    branches: dict[str, int] = {}
    fusion: dict[str, Amount] = {}


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


#: A larger count is none: sums of many stay finite, and what was written can be read.
MOST = 1 << 80
#: Sums of floats: a part may exceed its whole by rounding.
_ROUNDED = 1 + 1e-9

#: How every file of ours begins.
MARK = f'{{"format":"{FORMAT}"'.encode()


def encode(of: Coverage) -> bytes:
    """The coverage as one line of UTF-8 JSON with a newline."""
    hits = dict(of.functions), dict(of.lines), dict(of.branches)
    file = _File(FORMAT, VERSION, of.sources, *hits, dict(of.fusion))
    return msgspec.json.encode(file) + b"\n"


def decode(data: bytes) -> Coverage:
    """The coverage that ``encode`` wrote. Raises ForeignFile, or NewerSchema for a later version's file."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise ForeignFile(f"this is no coverage file: its format is {head.format!r}, not {FORMAT!r}")
        if head.version > VERSION:
            raise NewerSchema(f"the coverage file has version {head.version}, this spikeprof reads up to {VERSION}")
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignFile(f"this is no coverage file of spikeprof: {error}") from error
    hits = (*file.functions.values(), *file.lines.values(), *file.branches.values())
    parts = [part for one in file.fusion.values() for part in (one.fused, one.fusible, one.all)]
    if min((*hits, *parts), default=0) < 0:
        raise ForeignFile("this is no coverage file of spikeprof: it holds a negative count")
    if max((*hits, *parts), default=0) > MOST:
        raise ForeignFile("this is no coverage file of spikeprof: it holds a count too large to be true")
    for name, one in file.fusion.items():
        if one.fused > one.fusible * _ROUNDED or one.fusible > one.all * _ROUNDED:
            raise ForeignFile(f"this is no coverage file of spikeprof: of {name} more is fused than there is")
    return Coverage(file.sources, file.functions, file.lines, file.branches, file.fusion)
