"""What the sections of the terminal summary are made of: lines, paragraphs, tables with bars, findings.

Made for 80 columns, and whole from 60 to as wide as one likes, with and without colour, piped into a file, and on
terminals that know nothing but ASCII. Names from traces reach the terminal as plain text: no markup, no escapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from spikeprof.analyzers.base import Finding
from spikeprof.reports import finding_text
from spikeprof.reports import format as fmt
from spikeprof.reports import sentences as say
from spikeprof.reports.class_names import class_names
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.model import PlainTable, rows

MAX_WIDTH = 140
MAX_TEXT = 100  # longer lines of prose are hard to read
MAX_EVIDENCE = 3  # of one finding

#: Stands for the space between a number and its unit until lines are broken: a character that no name holds.
_GLUE = "\ue000"
_UNIT_GAP = re.compile(r"(?<=\d) (?=(?:[nµm]?s|min|h|%|[KMGT]?i?B|[kMGT]B/s|W|J|MHz|°C)(?:\W|$))")
_EIGHTHS = " ▏▎▍▌▋▊▉"

_SEVERITIES = {"critical": ("✗", "bold red"), "warning": ("!", "bold yellow"), "info": ("i", "bold blue")}


@dataclass(frozen=True, slots=True)
class Screen:
    """Where to print, how wide, and whether nothing but ASCII can be shown. Lines never end in blanks."""

    console: Console
    width: int
    ascii: bool

    @classmethod
    def of(cls, console: Console) -> Screen:
        """The screen of a console, no narrower than 40 and no wider than 140 characters."""
        plain = console.options.ascii_only or not console.encoding.lower().startswith("utf")
        return cls(console, max(40, min(console.width, MAX_WIDTH)), plain)

    def text(self, content: str, style: str = "") -> Text:
        """Plain text in one style; nothing in it is markup, and no line breaks between a number and its unit."""
        glued = _UNIT_GAP.sub(_GLUE, content)
        plain = fmt.ascii_only(glued).replace(fmt.ascii_only(_GLUE), _GLUE) if self.ascii else glued
        return Text().append(plain, style or None)

    def line(self, *parts: Text) -> None:
        """One line of parts, printed as it is."""
        whole = Text().join(parts)
        whole.plain = whole.plain.replace(_GLUE, " ")
        whole.rstrip()
        self.console.print(whole, highlight=False, soft_wrap=True)

    def hanging(self, left: Text, right: Text, indent: int = 0) -> None:
        """Text beside a mark or label, wrapped so that its lines begin under one another."""
        room = min(self.width, MAX_TEXT) - indent
        for number, line in enumerate(right.wrap(self.console, room, overflow="fold")):
            start = left.copy() if number == 0 else Text()
            start.pad_right(indent - start.cell_len)
            self.line(start, line)

    def prose(self, content: str, style: str = "") -> None:
        """A paragraph no wider than is good to read."""
        self.hanging(Text(), self.text(content, style))

    def heading(self, content: str) -> None:
        """A blank line and a heading that is ruled to the right edge."""
        text = self.text(clip(content, self.width), "bold")
        rule = self.width - text.cell_len - 1
        self.console.print()
        self.line(text, Text(" " + ("-" if self.ascii else "─") * rule if rule > 0 else "", style="dim"))

    def not_measured(self, content: str) -> None:
        """One thing that was not measured, beside its mark."""
        self.hanging(self.text("?", "cyan"), self.text(content), 2)


def print_finding(screen: Screen, finding: Finding) -> None:
    """What is wrong and where, its evidence, and what to do."""
    mark, style = _SEVERITIES[finding.severity]
    head = screen.text(say.rule_title(finding.rule), "bold")
    where = f" ({finding_text.scope(finding.scope, screen.width - 20)})" if finding.scope else ""
    head.append_text(screen.text(f"{where} [{printable(finding.rule)}]", "dim"))
    action = screen.text("→ " + printable(finding.recommendation), "green")
    if finding.saving is not None:
        action.append_text(screen.text(f" Saves {finding_text.saving(finding.saving)}.", "dim"))
    screen.hanging(screen.text(mark, style), head, 2)
    screen.hanging(Text(), screen.text(finding_text.evidence(finding.evidence, MAX_EVIDENCE)), 2)
    screen.hanging(Text(), action, 2)


# ---------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers: its key in the table, its heading, and the least screen width at which it is shown."""

    key: str
    heading: str
    from_width: int = 0


def print_table(
    screen: Screen,
    first: str,
    columns: Sequence[Column],
    entries: Sequence[dict[str, Any]],
    names_in: Callable[[int], Sequence[str]],
    bar_of: str = "",
    below: Sequence[str] = (),
) -> None:
    """Names in what room there is, numbers right-aligned, at the end a bar for the column ``bar_of`` if it is named.

    ``names_in`` gives the names of the entries in so many characters; ``below`` a line under each, none where empty.
    """
    kept = [c for c in columns if screen.width >= c.from_width]
    cells = [[fmt.quantity(c.key, row.get(c.key)) for row in entries] for c in kept]
    widths = [max(len(c.heading), *map(len, values)) for c, values in zip(kept, cells, strict=True)]
    bar_width = 0 if screen.width < 70 else 8 if screen.width < 110 else 20
    room = screen.width - sum(w + 2 for w in widths) - (bar_width + 1 if bar_width else 0)
    names = names_in(room)
    room = min(room, max(24, *map(len, names)))
    heading = first.ljust(room) + "".join(f"  {c.heading:>{w}}" for c, w in zip(kept, widths, strict=True))
    screen.line(screen.text(heading, "dim"))
    largest = max((row[bar_of] for row in entries if fmt.is_number(row.get(bar_of))), default=0) or 1
    for i, name in enumerate(names):
        numbers = "".join(f"  {values[i]:>{w}}" for values, w in zip(cells, widths, strict=True))
        value = entries[i].get(bar_of)
        bar = _bar(screen, value / largest, bar_width) if bar_width and value is not None else ""
        screen.line(screen.text(name.ljust(room)), screen.text(numbers), screen.text(f" {bar}", "blue"))
        if i < len(below) and below[i]:
            screen.line(screen.text(f"  {below[i]}", "dim"))


def print_classes(screen: Screen, table: PlainTable, known: Sequence[Column], bar_of: str) -> None:
    """A row for each class of launches, with those of the columns that have a value anywhere."""
    entries = rows(table)
    print_table(screen, "Kernel", measured(known, entries), entries, lambda room: class_names(table, room)[0], bar_of)


def measured(columns: Sequence[Column], entries: Sequence[dict[str, Any]]) -> list[Column]:
    """Those of the columns that have a value anywhere."""
    return [c for c in columns if any(row.get(c.key) is not None for row in entries)]


def clipped(names: Sequence[str], room: int) -> list[str]:
    """Names in so many characters, cut at their ends."""
    return [clip(name, room) for name in names]


def _bar(screen: Screen, value: float, width: int) -> str:
    """A bar for a share from 0 to 1; the smallest amount still shows."""
    if not value > 0:
        return ""
    if screen.ascii:
        return "#" * max(1, round(min(value, 1) * width))
    eighths = max(1, round(min(value, 1) * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
