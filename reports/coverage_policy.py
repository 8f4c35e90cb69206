"""A policy for coverage: bounds of its measures in a JSON or YAML file, and whether a coverage keeps to them.

    version: 1
    require:
      fusion.time: 50 %            # of the time of fusible kernels, at least
      branches: 0.85
      functions: {min: 0.2, max: 1}

A measure that could not be measured does not keep to a bound: not seen is not healthy.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from spikeprof.profiler.errors import InputError
from spikeprof.reports.coverage import Coverage, Share, shares

VERSION = 1
_MOST_BYTES = 1_000_000

#: Every measure that a policy can bound, in the order in which they are shown.
MEASURES = tuple(shares(Coverage()))
#: How values are shown: aliases of aliases on a page of YAML would be terabytes as text.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 1
_ALIASES = {"function": "functions", "line": "lines", "branch": "branches"}


@dataclass(frozen=True, slots=True)
class Bound:
    """What a measure must be: at least and at most, as shares; None = no such bound."""

    measure: str
    least: float | None
    most: float | None


@dataclass(frozen=True, slots=True)
class Check:
    """One bound, held against a coverage."""

    bound: Bound
    share: Share

    @property
    def passed(self) -> bool:
        """Whether the measure is known and within its bounds."""
        value, bound = self.share.value, self.bound
        if value is None:
            return False
        return (bound.least is None or value >= bound.least) and (bound.most is None or value <= bound.most)


def check(policy: list[Bound], coverage: Coverage) -> list[Check]:
    """Every bound of the policy, in its order."""
    found = shares(coverage)
    return [Check(bound, found[bound.measure]) for bound in policy]


def read_policy(path: Path) -> list[Bound]:
    """The bounds in a file: JSON where it ends in ``.json``, else YAML. Raises InputError, naming what is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read the policy {path}: {error.strerror or error}") from error
    if len(data) > _MOST_BYTES:
        raise InputError(f"the policy {path} has more than {_MOST_BYTES:,} bytes")
    try:
        found = msgspec.json.decode(data) if path.suffix == ".json" else msgspec.yaml.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise InputError(f"the policy {path} cannot be read as {kind}: {error}") from error
    try:
        return parse(found)
    except ValueError as error:
        raise InputError(f"the policy {path}: {error}") from error


def parse(found: Any) -> list[Bound]:
    """The bounds that a policy's data states. Raises ValueError."""
    if not isinstance(found, dict) or not isinstance(found.get("require"), dict) or not found["require"]:
        raise ValueError('it must hold "require": a measure and its bound for each line')
    if unknown := [str(key) for key in found if key not in ("version", "require")]:
        raise ValueError(f"it holds {unknown[0]!r}, which is none of version and require")
    version = found.get("version", VERSION)
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"it has version {_SHORT.repr(version)}; this spikeprof reads {VERSION}")
    bounds = [_bound(str(name), value) for name, value in found["require"].items()]
    names = [bound.measure for bound in bounds]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is bounded twice")
    return bounds


def _bound(name: str, value: Any) -> Bound:
    measure = _ALIASES.get(name, name)
    if measure not in MEASURES:
        near = difflib.get_close_matches(measure, MEASURES, 1)
        meant = f": did you mean {near[0]}?" if near else f"; measures: {', '.join(MEASURES)}"
        raise ValueError(f"there is no measure {name!r}{meant}")
    if not isinstance(value, dict):
        return Bound(measure, _share(name, value), None)
    if not value or set(value) - {"min", "max"}:
        raise ValueError(f"{name}: write min, max or both")
    least, most = (_share(f"{name}.{key}", value[key]) if key in value else None for key in ("min", "max"))
    if least is not None and most is not None and least > most:
        raise ValueError(f"{name}: its min is above its max")
    return Bound(measure, least, most)


def _share(name: str, value: Any) -> float:
    """0.85, or ``85 %``."""
    text = value.strip() if isinstance(value, str) else ""
    shown = _SHORT.repr(value)
    try:
        plain = "" if isinstance(value, (list, dict)) else str(value)
        number = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(plain)
    except ValueError:
        raise ValueError(f'{name}: {shown} is no share: write 0.85 or "85 %"') from None
    if not math.isfinite(number) or not 0 <= number <= 1:
        hint = f': write {number / 100:g} or "{number:g} %"' if 1 < number <= 100 and not text else ""
        raise ValueError(f"{name}: {shown} is not from 0 to 1{hint}")
    return number
