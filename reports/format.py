"""The one place where numbers and names become text; all other modules with words build on it.

Numbers are rounded half to even at three significant digits and keep their trailing zeros, so that a column of
them reads alike. Units are separated by a space. ``None`` and NaN are never shown as a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime

from spikeprof.analyzers.base import Metric
from spikeprof.profiler.units import UNIT_OF_SUFFIX, unit_of
from spikeprof.reports.kernel_names import printable
from spikeprof.reports.titles import IDLE_CLASSES, METRIC_TITLES, RESOURCES, SPELLED

#: Shown where a number would stand that was not measured.
ABSENT = "–"

_TIME = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_BINARY = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_RATE = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
_FLOPS = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1.0, "FLOP/s"))
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_ENERGY = ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"))


# ---------------------------------------------------------------- numbers


def digits(value: float, significant: int = 3) -> str:
    """A plain number at so many significant digits, trailing zeros kept: 5.52, 12.4, 123, 1,234."""
    if value == 0:
        return "0"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    if rounded == 0:
        return "0"
    places = significant - 1 - math.floor(math.log10(abs(rounded)))  # 9.996 became 10.0
    return f"{rounded:,.{max(places, 0)}f}"


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """In the largest unit in which the rounded value is at least 1."""
    if value == 0:
        return f"0 {steps[-1][1]}"
    for step, unit in steps:
        amount = value / step
        if abs(amount) >= 0.9995:
            exact = step == 1.0 and float(amount).is_integer() and abs(amount) < 1000
            return f"{amount:.0f} {unit}" if exact else f"{digits(amount)} {unit}"
    return f"{digits(value / steps[-1][0])} {steps[-1][1]}"


def duration(ns: float) -> str:
    """Nanoseconds as 840 ns, 5.52 ms, 12.3 s, 3 min 07 s, 2 h 05 min."""
    seconds = abs(ns) / 1e9
    if seconds < 99.95:
        return _scaled(ns, _TIME)
    sign = "-" if ns < 0 else ""
    whole = round(seconds)
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{sign}{minutes // 60:,} h {minutes % 60:02d} min"


def magnitude(value: float) -> str:
    """A number as a tensor holds it, which has no unit: 65,504, 12.4, 0.0610, 3.39e38."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else digits(value)
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def moment(ns: float) -> str:
    """A point on the recording's clock, to the microsecond: 2.260152 s."""
    return f"{ns / 1e9:,.6f} s"


def size(n_bytes: float) -> str:
    """Bytes in binary units: 512 B, 1.50 GiB."""
    return _scaled(n_bytes, _BINARY)


def rate(bytes_per_s: float) -> str:
    """Bytes per second in the decimal units that data sheets use: 391 GB/s, 4.80 TB/s."""
    return _scaled(bytes_per_s, _RATE)


def share(value: float) -> str:
    """A share as a percentage that never rounds onto 0 or 100 what is not: 97.4 %, 99.98 %, < 0.01 %."""
    percent = value * 100
    if value in (0, 1):
        return f"{percent:.0f} %"
    if 0 < percent < 0.01:
        return "< 0.01 %"
    if 99.99 < percent < 100:
        return "> 99.99 %"
    fine = abs(percent) < 0.95 or 99.95 <= percent < 100
    return f"{percent:,.{2 if fine else 1}f} %"


def change(value: float) -> str:
    """A relative change with its sign: +1.6 %, -3.0 %, ±0.0 %."""
    text = f"{abs(value) * 100:,.1f} %"
    if text == "0.0 %":
        return "±0.0 %"
    return ("+" if value > 0 else "-") + text


def count(value: float) -> str:
    """A count with thousands separators: 77,056; a mean of small ones with a decimal: 3.5."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:,.1f}"


#: Columns that hold a number that names something, shown without separators.
_ORDINALS = ("pid", "parent_pid", "rank", "device", "stream", "thread_id", "numa_node")
_CUPTI_VERSIONS = ("libcupti_version", "libcupti", "fixed_in")

#: Columns that hold a point in time, not a length of time.
_MOMENTS = ("bin_start_ns", "end_ns", "start_ns", "steady_begin_ns", "t_ns")

#: Ratios that are numbers of something, not so many times something else.
_PLAIN_RATIOS = ("drift_correlation_ratio", "instructions_per_cycle_ratio", "trend_correlation_ratio",
                 "utilisation_ratio", "waves_ratio")  # fmt: skip

_BY_UNIT: dict[str | None, Callable[[float], str]] = {
    "ns": duration,
    "us": lambda v: duration(v * 1e3),
    "bytes": size,
    "bytes/s": rate,
    "FLOP/s": lambda v: _scaled(v, _FLOPS),
    "FLOP/byte": lambda v: f"{digits(v)} FLOP/byte",
    "share": share,
    "count": count,
    "ratio": lambda v: f"{digits(v)}×",
    "W": lambda v: f"{digits(v)} W",
    "J": lambda v: _scaled(v, _ENERGY),
    "MHz": lambda v: f"{v:,.0f} MHz",
    "°C": lambda v: f"{v:.0f} °C",
    "bits": lambda v: f"{digits(v)} bits" if abs(v) >= 0.05 else f"{v:.2f} bits",
    "value": magnitude,
    "id": lambda v: f"{v:.0f}",
}


def is_number(value: object) -> bool:
    """Whether the value is a number that can be shown: not None, not NaN, not infinite, not a flag."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def quantity(name: str, value: object, absent: str = ABSENT) -> str:
    """A value in the unit that its column's or metric's name states; text is passed through made printable."""
    if name in _CUPTI_VERSIONS:
        return cupti_version(str(value)) if value else absent
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return printable(value)
    return _number(name, value) if isinstance(value, int | float) and math.isfinite(value) else absent


def _number(name: str, value: float) -> str:
    if name in _MOMENTS:
        return moment(value)
    if name in _ORDINALS:
        return f"{value:.0f}"
    if name in _PLAIN_RATIOS:
        return "< 0.01" if 0 < value < 0.005 else f"{value:.2f}" if abs(value) < 10 else digits(value)
    unit = unit_of(name)
    if unit in _BY_UNIT:
        return _BY_UNIT[unit](value)
    return count(value) if isinstance(value, int) or value.is_integer() else digits(value)


def scale(name: str, most: float) -> tuple[float, str]:
    """(what to divide by, its unit) so that an axis up to ``most`` has readable numbers: rates in TB/s, not B/s."""
    steps = {"bytes/s": _RATE, "FLOP/s": _FLOPS}.get(unit_of(name) or "", ((1.0, unit_of(name) or ""),))
    return next((step for step in steps if most >= step[0]), steps[-1])


def brief(name: str, value: object) -> str:
    """A value for a narrow cell: as ``quantity``, but large counts as 44.0 M; empty where not measured."""
    if unit_of(name) == "count" and is_number(value) and abs(value) >= 10_000:  # type: ignore[arg-type]
        return _scaled(value, _LARGE)  # type: ignore[arg-type]
    return quantity(name, value, "")


def bounded(name: str, value: object, low: object, high: object) -> str:
    """A value with its bounds: ``512 MiB (506 MiB to 518 MiB)``; the value alone where they say no more."""
    text, ends = quantity(name, value), [quantity(name, end) for end in (low, high)]
    return text if set(ends) == {text} or not is_number(value) else f"{text} ({ends[0]} to {ends[1]})"


#: Bounds nearer to the value than this share of it are not said beside it.
_NEAR_SHARE = 0.02


def spread(name: str, value: float, low: float | None, high: float | None) -> str:
    """How far the bounds are from the value, as ``±12 %`` of it (of a share: in points, ``±3``); empty where near."""
    if low is None or high is None:
        return ""
    most = max(high - value, value - low)
    if unit_of(name) == "share":
        return f"±{most * 100:.0f}" if most >= _NEAR_SHARE else ""
    return f"±{most / abs(value) * 100:,.0f} %" if value and most >= _NEAR_SHARE * abs(value) else ""


def not_measured(reason: str = "") -> str:
    """What stands in place of a number that was not measured."""
    return f"not measured: {printable(reason)}" if reason else "not measured"


def metric_value(metric: Metric) -> str:
    """A metric's value with its unit, or why there is none."""
    return quantity(metric.name, metric.value, not_measured(metric.reason))


# ---------------------------------------------------------------- names


def title(name: str) -> str:
    """What a metric or column is called on screen: ``idle_share`` -> ``Idle``; the unit is with the value."""
    if name in METRIC_TITLES:
        return METRIC_TITLES[name]
    suffixes = [s for s in UNIT_OF_SUFFIX if name.endswith(s) and s != name]
    stem = name[: -len(max(suffixes, key=len))] if suffixes else name
    words = " ".join(SPELLED.get(word, word) for word in stem.replace("_", " ").replace("-", " ").split())
    return words[:1].upper() + words[1:]


def within(text: str) -> str:
    """A title as a part of a sentence: its first letter small, unless it begins a name in capitals."""
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def label(name: str) -> str:
    """A class, state or category as it reads in running text: ``launch_bound`` -> ``launch bound``."""
    return printable(name).replace("_", " ")


def category(column: str, value: object) -> str:
    """A value of a column that sorts rows into kinds, as legends show it."""
    if column == "class" and value in IDLE_CLASSES:
        return IDLE_CLASSES[str(value)][0]
    if column in ("device", "rank"):
        return f"{title(column)} {value}"
    return title(str(value)) if unit_of(str(value)) else label(str(value))


def resources(names: str, short: bool = False) -> str:
    """``registers+shared_memory`` -> ``registers and shared memory``, or ``regs+shared`` for a narrow cell."""
    known = [RESOURCES.get(name, (label(name), label(name)))[short] for name in names.split("+") if name]
    return "+".join(dict.fromkeys(known)) if short else joined(list(dict.fromkeys(known)))


def plural(number: float, one: str, many: str = "") -> str:
    """``1 window``, ``3 windows``."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def sentence(text: str) -> str:
    """Something said in passing as a sentence: ``no counters`` -> ``No counters.``"""
    return f"{text[:1].upper()}{text[1:]}."


def joined(parts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def cupti_version(number: str) -> str:
    """``130001`` -> ``13.0.1``; the running number of libraries before CUDA 13 as ``API 28``."""
    if number.isdecimal() and number.isascii():
        value = int(number)
        return f"{value // 10000}.{value // 100 % 100}.{value % 100}" if value >= 10000 else f"API {value}"
    return printable(number)


def date(unix_ns: int) -> str:
    """When a recording was made, in UTC; empty when unknown."""
    if unix_ns <= 0:
        return ""
    try:
        return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return ""


def command_line(arguments: tuple[str, ...]) -> str:
    """A command as it would be typed; quoted where a shell would need it."""
    from shlex import join

    return printable(join(arguments))


# ---------------------------------------------------------------- plain text


_ASCII: dict[str, str] = {"°": "deg ", "±": "+-", "→": "->", "≤": "<=", "≥": ">="}
_ASCII |= dict(zip("µ×–—−…·÷’“”█░●✓✗", 'ux---~-/\'""#.*+x', strict=True))
_ASCII_TABLE = str.maketrans(_ASCII)


def ascii_only(text: str) -> str:
    """The text for a terminal that can show nothing but ASCII."""
    return text.translate(_ASCII_TABLE).encode("ascii", "backslashreplace").decode("ascii")
