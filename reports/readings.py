"""The readings of ``spikeprof counters`` as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from spikeprof.profiler.counter_metrics import METRICS, Reading
from spikeprof.profiler.trace import CollectorNote
from spikeprof.profiler.units import unit_of
from spikeprof.reports import format as fmt
from spikeprof.reports.kernel_names import printable


def render_readings(readings: Sequence[Reading], note: CollectorNote, console: Console) -> None:
    """Print a block for each GPU, and what was not sampled."""
    for device, of_device in groupby(readings, lambda reading: reading.device):
        rows = list(of_device)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", title_style="bold")
        table.title = f"GPU {device}: counters over {fmt.duration(max(row.sampled_ns for row in rows))} of samples"
        table.add_column("counter", no_wrap=True)
        for heading in ("total", "mean", "highest millisecond"):
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(_title(row.metric), *_cells(row))
        console.print(table)
        for line in _hit_rates(rows):
            console.print(line)
    if note.reason:
        console.print(f"\n{printable(note.reason)}", markup=False)


def _title(metric: str) -> str:
    known = METRICS.get(metric)
    return fmt.title(metric) if known else printable(metric)


def _cells(row: Reading) -> list[str]:
    if row.total is None:
        return [fmt.ABSENT, *(fmt.quantity(row.metric, value) for value in (row.mean, row.highest))]
    if unit_of(row.metric) == "bytes":
        return [fmt.size(row.total), fmt.rate(row.mean), fmt.rate(row.highest)]
    return [fmt.count(row.total), f"{fmt.count(row.mean)}/s", f"{fmt.count(row.highest)}/s"]


def _hit_rates(rows: Sequence[Reading]) -> list[str]:
    total = {row.metric: row.total for row in rows if row.total is not None}
    found = []
    for cache in ("l1", "l2"):
        lookups, hits = total.get(f"{cache}_sectors_count"), total.get(f"{cache}_hit_sectors_count")
        if lookups and hits is not None:
            found.append(f"{cache.upper()} hit rate {fmt.share(hits / lookups)}")
    return found
