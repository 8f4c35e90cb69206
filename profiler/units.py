"""Unit suffixes of column and metric names: the one list that schema, analyzers and reports share."""

from __future__ import annotations

#: Suffix -> what one unit of the value is. The longest matching suffix wins.
UNIT_OF_SUFFIX: dict[str, str] = {
    "_ns": "ns",
    "_us": "us",
    "_bytes_per_s": "bytes/s",
    "_flop_per_s": "FLOP/s",
    "_flop_per_byte": "FLOP/byte",
    "_bytes": "bytes",
    "_count": "count",
    "_share": "share",  # 0 to 1
    "_ratio": "ratio",  # a quotient that may exceed 1
    "_w": "W",
    "_j": "J",
    "_mhz": "MHz",
    "_celsius": "°C",
    "_bits": "bits",
    "_value": "value",  # a number as a tensor holds it, which has no unit
    "_id": "id",
}

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def unit_of(name: str) -> str | None:
    """The unit that the name of a column or metric states, or None for a name without one."""
    matches = [suffix for suffix in UNIT_OF_SUFFIX if name.endswith(suffix)]
    return UNIT_OF_SUFFIX[max(matches, key=len)] if matches else None


def is_running_total(metric: str) -> bool:
    """Whether a metric of the table ``samples`` counts up since the driver was loaded: take differences."""
    return metric == "energy_j" or "_total_" in metric
