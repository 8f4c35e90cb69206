"""The terminal: a live table of patterns with notices above it; where there is no terminal, one line per notice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spikeprof.analyzers.cache_pierce.model import Alert, PatternRow, Snapshot
from spikeprof.analyzers.cache_pierce.patterns import ANY, prefix_of
from spikeprof.reports import format as fmt
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.pierce import texts
from spikeprof.reports.pierce.routes import RouteError

MAX_ROWS = 15
_REFRESH_PER_S = 4
_EXPLAINED_SHARE = 0.9  # of a wider row's look-ups, from which on it is not shown
_NUMBERS_WIDTH = 43  # columns of numbers and the state, with their gaps
_STYLES = {"warn": "yellow", "alert": "bold red", "critical": "bold white on red"}
_STATES = {"learning": "dim", "quiet": "green", "suspect": "yellow", "alerting": "bold red"}


class TerminalRoute:
    """The route to people at a terminal, and the table of how things stand. Use as a context manager.

    ``heading`` says what is watched, ``known_by`` what would tell which keys exist. With ``table`` the live table is
    drawn, where ``console`` is a terminal.
    """

    name = "terminal"

    def __init__(self, console: Console, heading: str, *, table: bool = True, known_by: str = "") -> None:
        self._console = console
        self._heading = heading
        self._known_by = known_by
        self._snapshot: Snapshot | None = None
        self._notes: Sequence[str] = ()
        self._live: Live | None = None
        if table and console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._screen, refresh_per_second=_REFRESH_PER_S, transient=True
            )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    async def send(self, alert: Alert) -> None:
        """Print one notice, from a thread: a terminal that is stopped, or a pipe that is full, must hold up nobody."""
        try:
            await asyncio.to_thread(self.show, alert)
        except (OSError, SystemExit) as error:  # the latter is rich's answer to a broken pipe
            raise RouteError("nobody reads standard output any more", again=False) from error

    async def close(self) -> None:
        """Nothing to do: leaving the context takes the table away."""

    def show(self, alert: Alert) -> None:
        """Print one notice: in full for people at a terminal, as one line into a file or pipe."""
        style = "green" if alert.kind == "recovered" else _STYLES[alert.severity]
        line = self._text(f"{texts.clock(alert.ts_s)} {texts.summary(alert)}", style)
        if self._live is None:
            self._console.print(line, soft_wrap=True, highlight=False)
            return
        lines = [line, *(self._text("  " + text, "dim") for text in texts.details(alert)[1:])]
        self._console.print(*lines, sep="\n", highlight=False)

    def update(self, snapshot: Snapshot, notes: Sequence[str] = ()) -> None:
        """How things stand now; ``notes`` are lines below the table."""
        self._snapshot, self._notes = snapshot, notes

    def _text(self, content: str, style: str = "") -> Text:
        """Plain text: nothing in a key is markup or an escape sequence."""
        plain = self._console.options.ascii_only or not self._console.encoding.lower().startswith("utf")
        return Text(fmt.ascii_only(content) if plain else content, style)

    def _screen(self) -> Group:
        heading = self._text(clip(printable(self._heading), self._console.width), "bold")
        if self._snapshot is None or self._snapshot.ts_s is None:
            return Group(heading, self._text("no look-up yet", "dim"))
        snapshot = self._snapshot
        parts: list[RenderableType] = [heading, self._table(snapshot)]
        quieter = len(shown_rows(snapshot, len(snapshot.rows))) - MAX_ROWS
        if quieter > 0:
            parts.append(self._text(f"… and {fmt.plural(quieter, 'quieter pattern')}", "dim"))
        parts += [self._text(line, "dim") for line in (*footer(snapshot, self._known_by), *self._notes)]
        return Group(*parts)

    def _table(self, snapshot: Snapshot) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=False, header_style="dim")
        room = max(16, self._console.width - _NUMBERS_WIDTH)
        table.add_column("Pattern", width=room, no_wrap=True)
        for name, width in (("QPS", 7), ("usually", 7), ("Miss", 7), ("usually", 7)):
            table.add_column(name, justify="right", width=width, no_wrap=True)
        table.add_column("State", width=8, no_wrap=True)
        for row in shown_rows(snapshot):
            cells = (texts.place(row.tenant, row.pattern), *numbers(row))
            state = self._text(texts.STATES[row.state], _STATES[row.state])
            table.add_row(self._text(clip(cells[0], room)), *(self._text(c) for c in cells[1:]), state)
        return table


def shown_rows(snapshot: Snapshot, most: int = MAX_ROWS) -> list[PatternRow]:
    """Rows for a reader: what alerts first, then the busiest. Wider rows that say nothing of their own are left out."""
    order = {"alerting": 0, "suspect": 1}
    explained = _explained_counts(snapshot.rows)
    telling = [
        row
        for row in snapshot.rows
        if row.state == "alerting"
        or explained.get((row.tenant, row.pattern), 0) < _EXPLAINED_SHARE * row.lookups_count
        or row.level in ("pattern", "all")
    ]
    return sorted(telling, key=lambda row: (order.get(row.state, 2), -row.qps))[:most]


def _explained_counts(rows: Sequence[PatternRow]) -> dict[tuple[str, str], int]:
    """Of wider rows (``user:{any}``, ``{any}``): look-ups of patterns in them that have rows of their own."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.level == "pattern":
            prefix = prefix_of(row.pattern)
            for wider in {prefix + ANY, ANY}:
                counts[row.tenant, wider] = counts.get((row.tenant, wider), 0) + row.lookups_count
    return counts


def numbers(row: PatternRow) -> tuple[str, str, str, str]:
    """Look-ups per second and miss rate, each with what is usual."""
    usual = row.baseline
    miss = [texts.number("miss_rate", value) for value in (row.miss_rate, usual.miss_rate)]
    return texts.rate(row.qps), texts.rate(usual.qps), miss[0], miss[1]


def footer(snapshot: Snapshot, known_by: str) -> list[str]:
    """Event time and counts; what could not be used; whether keys that exist nowhere are measured."""
    counts = snapshot.counts
    lines = [
        f"{texts.clock(snapshot.ts_s)}, {fmt.plural(counts.lookups_count, 'look-up')}, "
        f"{fmt.plural(counts.misses_count, 'miss', 'misses')}, {fmt.plural(len(snapshot.active), 'open alert')}"
    ]
    if left_out := texts.left_out(counts):
        lines.append(f"left out: {left_out}")
    lines.append(f"keys that exist nowhere: {texts.known(snapshot.illegal_per_s, 'illegal_per_s', known_by)}")
    return lines
