"""How the GPUs are joined, in words and as a matrix: made from the result of the analyzer ``topology``.

Links have the names of ``nvidia-smi topo``. Rates in the matrix are GB/s in one direction, measured/theoretical.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from spikeprof.analyzers.base import Result
from spikeprof.reports import format as fmt
from spikeprof.reports import sentences as say
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.model import PlainTable, Report, rows
from spikeprof.reports.screen import Screen, print_finding

_HOST = -1
_NO_ACCESS = "*"
_PATHS = {
    "PIX": "through one PCIe switch at most",
    "PXB": "through several PCIe switches",
    "PHB": "through a PCIe host bridge",
    "NODE": "through the PCIe host bridges of one NUMA node",
    "SYS": "through the link between CPUs",
    "PCIe": "which way on PCIe is not known",
    "?": "which link is not known",
}
_FABRICS = {"nvswitch": "NVLink through switches", "nvlink": "NVLink"}

Row = dict[str, Any]


def matrix(result: Result, *, theoretical: bool = True, measured: bool = True) -> PlainTable:
    """A row per source GPU, a column per destination; empty for fewer than two GPUs."""
    measured = measured and is_measured(result)
    links, gpus = _by_ends(result), result.tables.get("gpus", {}).get("device", [])
    if len(gpus) < 2:
        return {}

    def cell(a: int, b: int) -> str:
        row = links.get((a, b))
        return fmt.ABSENT if row is None else _cell(row, theoretical, measured)

    return {"from": [_gpu(a) for a in gpus], **{_gpu(b): [cell(a, b) for a in gpus] for b in gpus}}


def matrices(result: Result, width: int) -> list[tuple[str, PlainTable]]:
    """(heading, matrix): one with both rates, or one for each where that is too wide for ``width`` characters."""
    both = matrix(result)
    what = "GPU to GPU, in one direction"
    if not is_measured(result):
        return [(f"{what}: theoretical GB/s", both)] if both else []
    if both and _width(both, 1) <= width:
        return [(f"{what}: measured/theoretical GB/s", both)]
    parts = ("theoretical", matrix(result, measured=False)), ("measured", matrix(result, theoretical=False))
    return [(f"{what}: {name} GB/s", table) for name, table in parts if table]


def is_measured(result: Result) -> bool:
    """Whether any copy was measured."""
    return any(row["measured_bytes_per_s"] is not None for row in _links(result))


def hosts(result: Result) -> PlainTable:
    """A row per GPU: its PCIe link, the rates to the GPU and from it, its NUMA node."""
    links, gpus = _by_ends(result), rows(result.tables.get("gpus", {}))
    there = [links.get((_HOST, gpu["device"])) for gpu in gpus]
    back = [links.get((gpu["device"], _HOST)) for gpu in gpus]
    return {
        "GPU": [_gpu(gpu["device"]) for gpu in gpus],
        "link": [_pcie(row) for row in back],
        "to the GPU": [_rates(row, is_measured(result)) for row in there],
        "to the host": [_rates(row, is_measured(result)) for row in back],
        "NUMA node": [fmt.quantity("numa_node", gpu["numa_node"]) for gpu in gpus],
    }


def legend(result: Result) -> list[str]:
    """What the words and signs of the matrix mean; only those that are in it."""
    pairs = [row for row in _links(result) if _HOST not in (row["src_device"], row["dst_device"])]
    words = dict.fromkeys(_word(row) for row in pairs)
    joined = {row["kind"] for row in pairs} & set(_FABRICS)
    parts = [f"NVn: n NVLinks{', through switches' if 'nvswitch' in joined else ''}"] if joined else []
    parts += [f"{word}: {meaning}" for word, meaning in _PATHS.items() if word in words]
    reasons = dict.fromkeys(row["peer_access"] for row in pairs if _is_barred(row))
    if reasons:
        why = printable("; ".join(reasons))
        parts.append(f"{_NO_ACCESS}: no access to the other's memory ({why}), copies go through the host")
    return parts


def sources(result: Result) -> list[str]:
    """Where the theoretical rates come from, each once."""
    return [printable(text) for text in dict.fromkeys(row["peak_source"] for row in _links(result)) if text]


def not_measured(result: Result) -> list[str]:
    """Why links were not measured, each reason once; empty when all were."""
    reasons = dict.fromkeys(row["measured_reason"] for row in _links(result) if row["measured_bytes_per_s"] is None)
    return [printable(text) for text in reasons if text]


def suits(result: Result) -> str:
    """What tensor parallelism the links suit, and why; empty when it is not known."""
    hierarchy = next(iter(rows(result.tables.get("hierarchy", {}))), None)
    if hierarchy is None:
        one = len(result.tables.get("gpus", {}).get("device", [])) == 1
        return "One GPU: there is nothing to split a layer over." if one else ""
    fabric, levels, fitting = (hierarchy[name] for name in ("fabric", "levels_count", "group_gpus_count"))
    if fabric == "unknown":
        return "What the links suit is not known: the driver does not tell how the GPUs are joined."
    if fabric == "none":
        return (
            "The links do not suit tensor parallelism: no NVLink joins the GPUs, and none reaches another's memory. "
            "Fall back to pipeline or data parallelism."
        )
    if fabric == "pcie":
        return (
            "The links suit tensor parallelism in pairs at most (1 level): no NVLink joins the GPUs. Over PCIe fall "
            "back to pipeline or data parallelism."
        )
    both_ways, limits = hierarchy["both_ways_bytes_per_s"], ("two_level_bytes_per_s", "three_level_bytes_per_s")
    two, three = (fmt.rate(hierarchy[name]) for name in limits)
    why = (
        f"all NVLinks of a GPU carry {fmt.rate(both_ways)} in both directions together (2 levels from {two}, 3 from "
        f"{three})"
        if both_ways
        else "what the NVLinks carry is not known"
    )
    groups = f"groups of up to {2**levels} GPUs"
    here = f" {_FABRICS[fabric]} joins {hierarchy['gpus'].count(',') + 1} GPUs here: groups of {fitting}."
    return f"The links suit tensor parallelism in {fmt.plural(levels, 'level')} ({groups}): {why}.{here}"


def notes(result: Result) -> list[str]:
    """What a reader of both tables must know: units, words, sources, what was not measured."""
    if not _links(result):
        return []
    rates = "Rates are GB/s in one direction, " + ("measured/theoretical." if is_measured(result) else "theoretical.")
    found = [" ".join([rates, *(f"{text}." for text in legend(result))])]
    found.append(f"Theoretical rates: {'; '.join(sources(result))}.")
    found += [f"Not measured: {text}." for text in not_measured(result)]
    return found


def table_lines(table: PlainTable, width: int) -> list[str]:
    """A table of texts as lines no wider than ``width``: the columns that do not fit follow below, heads repeated."""
    names = list(table)
    gap = 1 if _width(table, 1) <= width < _width(table, 2) else 2
    lines: list[str] = []
    while len(names) > 1:
        shown = names[:2]
        while len(shown) < len(names) and _width({n: table[n] for n in names[: len(shown) + 1]}, gap) <= width:
            shown = names[: len(shown) + 1]
        lines += [""] if lines else []
        wide = [_column_width(table, name) for name in shown]
        for cells in (shown, *zip(*(table[name] for name in shown), strict=True)):
            lines.append((" " * gap).join(c.ljust(w) for c, w in zip(cells, wide, strict=True)).rstrip())
        names = [names[0], *names[len(shown) :]]
    return lines


def _column_width(table: PlainTable, name: str) -> int:
    return max(len(name), *map(len, table[name]))


def _width(table: PlainTable, gap: int) -> int:
    return sum(_column_width(table, name) + gap for name in table) - gap


def _links(result: Result) -> list[Row]:
    return rows(result.tables.get("links", {}))


def _by_ends(result: Result) -> dict[tuple[int, int], Row]:
    return {(row["src_device"], row["dst_device"]): row for row in _links(result)}


def _gpu(device: int) -> str:
    return f"GPU {device}"


def _cell(row: Row, theoretical: bool, measured: bool) -> str:
    if not theoretical:
        return fmt.ABSENT if row["measured_bytes_per_s"] is None else _gb_per_s(row["measured_bytes_per_s"])
    return f"{_word(row)} {_rates(row, measured)}{_NO_ACCESS if _is_barred(row) else ''}"


def _word(row: Row) -> str:
    if row["kind"] in _FABRICS:
        return f"NV{'?' if row['links_count'] is None else row['links_count']}"
    if row["kind"] == "pcie":
        return printable(row["pcie_path"]) or "PCIe"
    return "?"


def _is_barred(row: Row) -> bool:
    return row["peer_access"] not in ("", "ok")


def _rates(row: Row | None, measured: bool) -> str:
    """``391/450``, or ``450`` where no rate was measured at all."""
    if row is None:
        return fmt.ABSENT
    peak = _gb_per_s(row["peak_bytes_per_s"])
    if not measured:
        return peak
    return f"{fmt.ABSENT if row['measured_bytes_per_s'] is None else _gb_per_s(row['measured_bytes_per_s'])}/{peak}"


def _gb_per_s(value: float | None) -> str:
    return fmt.digits(value / 1e9) if value is not None and fmt.is_number(value) else "?"


def _pcie(row: Row | None) -> str:
    """``PCIe 5 x16``, or ``PCIe 1 x8 (of 5 x16)`` for a link that runs below what both ends can."""
    if row is None or row["kind"] == "unknown":
        return fmt.ABSENT
    ways = (("generation", "links_count"), ("max_generation", "max_links_count"))
    now, most = (f"{row[generation] or '?'} x{row[lanes] or '?'}" for generation, lanes in ways)
    return f"PCIe {now}" if now == most or "?" in most else f"PCIe {now} (of {most})"


# ---------------------------------------------------------------- the terminal


def print_section(screen: Screen, report: Report) -> None:
    """How the GPUs are joined; nothing for one GPU."""
    result = report.result("topology")
    if result is not None and _print_matrices(screen, result):
        screen.prose(suits(result))


def _print_matrices(screen: Screen, result: Result) -> bool:
    """The matrix of GPUs under its heading, with what its words mean; whether there is one."""
    found = matrices(result, screen.width)
    for heading, table in found:
        screen.heading(heading)
        _print_lines(screen, table)
    for text in legend(result) if found else ():
        screen.prose(text, "dim")
    return bool(found)


def _print_lines(screen: Screen, table: PlainTable) -> None:
    for number, line in enumerate(table_lines(table, screen.width)):
        screen.line(screen.text(line, "" if number else "dim"))


def render_topology(result: Result, names: Sequence[str], problem: str, console: Console) -> None:
    """Print the answer of the analyzer ``topology`` alone: matrix, links to the host, what they suit, findings.

    ``names`` are the GPUs' products; ``problem`` is what could not be read, and why, or empty.
    """
    screen = Screen.of(console)
    screen.line(screen.text(clip(say.gpus([{"name": name} for name in names]), screen.width), "bold"))
    _print_matrices(screen, result)
    screen.heading(f"GPU and host, in one direction: {'measured/' if is_measured(result) else ''}theoretical GB/s")
    _print_lines(screen, hosts(result))
    screen.heading("What it suits")
    screen.prose(suits(result))
    for finding in result.findings:
        screen.console.print()
        print_finding(screen, finding)
    screen.heading("Where the rates come from")
    for text in sources(result):
        screen.hanging(screen.text("·", "dim"), screen.text(text), 2)
    for text in not_measured(result):
        screen.not_measured(f"Not measured: {text}")
    if problem:
        screen.not_measured(printable(problem))
