"""A model's graph in the terminal: a section of the summary, and the whole answer of ``spikeprof graph``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from spikeprof.analyzers.base import Result
from spikeprof.reports import model_graph as graphs
from spikeprof.reports import sentences as say
from spikeprof.reports.kernel_names import clip
from spikeprof.reports.model import Report, rows
from spikeprof.reports.screen import Column, Screen, clipped, measured, print_finding, print_table

_PART_COLUMNS = (
    Column("layers_count", "Layers", 70),
    Column("nodes_count", "Nodes"),
    Column("total_ns", "Total"),
    Column("part_time_share", "Share"),
)
_NODE_COLUMNS = (
    Column("launches_count", "Launches", 94),
    Column("gpu_time_ns", "GPU time"),
    Column("latency_ns", "Latency"),
    Column("host_ns", "On host", 76),
    Column("heat_share", "Heat"),
)
_HELD_COLUMNS = (
    Column("shape", "Shape"),
    Column("dtype", "Type", 70),
    Column("storage_bytes", "Held"),
    Column("peak_share", "Of peak"),
)
_MAX_ROWS = 8
_MAX_ROWS_IN_SUMMARY = 5


def print_section(screen: Screen, report: Report) -> None:
    """The model's graph in short; nothing where none was read."""
    result = report.result("model-graph")
    if result is None or not (summary := graphs.summary(result)):
        return
    screen.heading(f"Model graph: {summary}")
    for text in graphs.notes(result):
        screen.prose(text, "dim")
    _print(screen, result, "parts", "Part", _PART_COLUMNS, _MAX_ROWS_IN_SUMMARY)
    if result.tables["nodes"].get("kernel"):
        _print(screen, result, "nodes", "Node", _NODE_COLUMNS, _MAX_ROWS_IN_SUMMARY)


def _print(screen: Screen, result: Result, table: str, first: str, columns: Sequence[Column], most: int) -> None:
    """The first rows of one of the tables about a graph, with those of the columns that have a value anywhere."""
    entries = rows(result.tables.get(table, {}))[:most]
    if not entries:
        return
    names = [graphs.in_module(row, first.lower()) for row in entries]
    print_table(screen, first, measured(columns, entries), entries, partial(clipped, names), columns[-1].key)


def render_graph(result: Result, console: Console) -> None:
    """Print the answer of the analyzer ``model-graph`` alone: memory, time, layers × parts, findings."""
    screen = Screen.of(console)
    screen.line(screen.text(clip(graphs.title(result), screen.width), "bold"))
    for text in (graphs.summary(result), graphs.remark(result)):
        if text:
            screen.prose(text, "dim")
    if memory := graphs.memory(result):
        screen.heading("Memory")
        screen.prose(memory)
        _print(screen, result, "peak_tensors", "Node", _HELD_COLUMNS, _MAX_ROWS)
    if times := " ".join(text for text in (graphs.times(result), graphs.joined(result)) if text):
        screen.heading("Time")
        screen.prose(times)
        _print(screen, result, "parts", "Part", _PART_COLUMNS, _MAX_ROWS)
        screen.console.print()
        _print(screen, result, "nodes", "Node", _NODE_COLUMNS, _MAX_ROWS)
    if lines := graphs.heat_lines(result, screen.width, screen.ascii):
        screen.heading(f"Heat by part and layer{graphs.stack_of(result)}")
        for line in lines:
            screen.line(screen.text(line))
    if result.findings:
        screen.heading("Findings")
    for finding in result.findings:
        print_finding(screen, finding)
    _print_missing(screen, result)


def _print_missing(screen: Screen, result: Result) -> None:
    items = say.missing_metrics(result)
    if items:
        screen.heading("Not measured")
    for item in items:
        screen.not_measured(f"{item.what}: {item.why}")
