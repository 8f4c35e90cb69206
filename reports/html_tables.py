"""Tables of the HTML page: from plain tables to cells with text, a sort key and a bar. Layout is the template's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spikeprof.profiler.units import unit_of
from spikeprof.reports import format as fmt
from spikeprof.reports import sentences as say
from spikeprof.reports.kernel_names import printable, short_names
from spikeprof.reports.model import PlainTable

MIN_ROWS_TO_FILTER = 9
MAX_ROWS = 500
_NAME_WIDTH = 72
_SHORT = 40  # characters that stay on one line

#: Columns that hold versions as numbers, and names of kernels.
_VERSIONS = ("fixed_in", "libcupti_version")
#: Shares that say how much of what there is was used: a full bar means all of it.
_OF_THE_WHOLE = ("busy_share", "mean_share", "busiest_share", "saturated_time_share", "link_share", "occupancy_share",
                 "expected_sm_active_share", "alone_occupancy_share", "fused_occupancy_share", "zero_share",
                 "subnormal_share", "saturated_share")  # fmt: skip
_NAMES = ("name", "kernel", "next_kernel", "work_before", "work_after")


@dataclass(frozen=True, slots=True)
class Heading:
    """The head of a column. ``kind``: name, text, short, num or share."""

    text: str
    kind: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. ``sort`` is the number behind the text, ``full`` a long name, ``bar`` a percentage."""

    text: str
    kind: str
    sort: float | None = None
    title: str = ""
    full: str = ""
    bar: float | None = None


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """A table as the template draws it."""

    caption: str
    headings: list[Heading]
    cells: list[list[Cell]]
    filter: bool


def html_table(name: str, table: PlainTable, columns: Sequence[str] = ()) -> HtmlTable | None:
    """A plain table as cells, with the given columns or all of them; None when it has no rows."""
    bounds = {c: (f"low_{c}", f"high_{c}") for c in table if f"low_{c}" in table and f"high_{c}" in table}
    folded = {bound for pair in bounds.values() for bound in pair}
    kept = [c for c in columns or table if c in table and c not in folded]
    length = min((len(table[c]) for c in kept), default=0)
    if not length:
        return None
    shown = min(length, MAX_ROWS)
    made = [_column(c, table[c][:shown]) for c in kept]
    made = [_bounded(made[i], c, table, bounds[c]) if c in bounds else made[i] for i, c in enumerate(kept)]
    heading, _ = say.caption(name)
    more = f" (the first {fmt.count(shown)} of {fmt.count(length)})" if shown < length else ""
    cells = [list(row) for row in zip(*(cells for _, cells in made), strict=True)]
    return HtmlTable(heading + more, [h for h, _ in made], cells, shown >= MIN_ROWS_TO_FILTER)


def _column(name: str, values: Sequence[Any]) -> tuple[Heading, list[Cell]]:
    if name in _NAMES:
        return Heading(fmt.title(name), "name"), _name_cells([_text(name, v) for v in values])
    if unit_of(name) == "share":
        return Heading(fmt.title(name), "share"), _share_cells(name, values)
    if name not in _VERSIONS and any(fmt.is_number(v) for v in values):
        return Heading(fmt.title(name), "num"), [_number(name, v) for v in values]
    texts = [_text(name, v) for v in values]
    kind = "short" if max(map(len, texts)) <= _SHORT else "text"
    return Heading(fmt.title(name), kind), [Cell(t, kind) for t in texts]


def _bounded(
    column: tuple[Heading, list[Cell]], name: str, table: PlainTable, bounds: tuple[str, str]
) -> tuple[Heading, list[Cell]]:
    """The column with its bounds as a hover text, and beside the number where they are wide; without bars."""
    heading, cells = column
    low, high = (table[bound] for bound in bounds)
    found = []
    for cell, value, least, most in zip(cells, table[name], low, high, strict=False):
        if cell.sort is None:
            found.append(replace(cell, kind="num"))
            continue
        text = f"{fmt.brief(name, value)} {fmt.spread(name, value, least, most)}".strip()
        found.append(replace(cell, text=text, title=fmt.bounded(name, value, least, most), kind="num", bar=None))
    return replace(heading, kind="num"), found


def _text(name: str, value: object) -> str:
    if value is None or value == "" or (isinstance(value, float) and not fmt.is_number(value)):
        return fmt.ABSENT
    return fmt.quantity(name, value, printable(str(value)))


def _number(name: str, value: object) -> Cell:
    if not isinstance(value, int | float) or not fmt.is_number(value):
        return Cell(fmt.ABSENT, "num", title=fmt.not_measured())
    return Cell(fmt.quantity(name, value), "num", sort=float(value))


def _name_cells(names: list[str]) -> list[Cell]:
    short = short_names(names, _NAME_WIDTH)
    return [
        Cell(s, "name", title=n if s != n else "", full=n if s != n else "") for n, s in zip(names, short, strict=True)
    ]


def _share_cells(name: str, values: Sequence[Any]) -> list[Cell]:
    """Shares with a bar, the longest bar for the largest share of the column, or for the whole."""
    largest = 1 if name in _OF_THE_WHOLE else max((v for v in values if fmt.is_number(v)), default=0) or 1
    return [
        Cell(fmt.quantity(name, v), "share", sort=float(v), bar=round(100 * max(v, 0) / largest, 2))
        if fmt.is_number(v)
        else Cell(fmt.ABSENT, "share", title=fmt.not_measured())
        for v in values
    ]
