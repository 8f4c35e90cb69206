"""What pages are made of: sections with their notices, charts and tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spikeprof.reports.html_tables import HtmlTable


@dataclass(slots=True)
class Chart:
    """One figure of the page."""

    id: str
    caption: str
    note: str
    height: int
    figure: dict[str, Any]


@dataclass(slots=True)
class Section:
    """One section of the page: notices, charts, tables, in this order."""

    id: str
    nav: str
    title: str
    count: str = ""
    lead: str = ""
    notices: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    tables: list[HtmlTable] = field(default_factory=list)

    def add(self, *tables: HtmlTable | None) -> None:
        """Add the tables that there are."""
        self.tables += [t for t in tables if t is not None]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.notices or self.charts or self.tables)
