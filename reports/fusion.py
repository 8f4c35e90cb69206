"""Fusion coverage and chains in words and tables: made from the result of the analyzer ``fusion-coverage``."""

from __future__ import annotations

from functools import partial
from typing import Any

from spikeprof.analyzers.base import Result
from spikeprof.reports import format as fmt
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.model import PlainTable, Report, rows
from spikeprof.reports.screen import Column, Screen, clipped, measured, print_table
from spikeprof.reports.titles import BYTES_FROM, FUSION_VERDICTS, READ_BY, SAVING_FROM

_ARROW = " → "
_MAX_CHAIN_CHARS = 160  # in the page
_CHAIN_COLUMNS = ("chain", "runs_count", "total_ns", "gpu_time_share", "traffic_bytes", "fused_traffic_bytes",
                  "saved_share", "saving_ns", "saving_from", "read_by", "bytes_from")  # fmt: skip
_MEMBER_COLUMNS = ("chain_id", "place_count", "does", "kernel", "verdict", "mean_ns", "read_bytes", "written_bytes",
                   "saved_bytes")  # fmt: skip
_KERNEL_COLUMNS = ("kernel", "does", "verdict", "why", "gpu_time_share", "launches_count", "total_ns", "moved_bytes",
                   "bytes_from")  # fmt: skip
_SCREEN_COLUMNS = (
    Column("runs_count", "Runs", 90),
    Column("total_ns", "Total"),
    Column("traffic_bytes", "Traffic", 74),
    Column("saved_share", "Saved", 60),
    Column("saving_ns", "At most", 100),
    Column("gpu_time_share", "Share"),
)
_MAX_CHAINS = 4  # on a screen


def summary(result: Result) -> str:
    """``14.9 % of the time of fusible kernels is in fused ones (9.1 % of all kernels' time)``; empty if not known."""
    share, of_all = result.metric("fused_time_share"), result.metric("fused_of_all_time_share")
    if share is None or of_all is None:
        return ""
    return (
        f"{fmt.share(share)} of the time of fusible kernels is in fused ones ({fmt.share(of_all)} of all kernels' time)"
    )


def details(result: Result) -> str:
    """``By launches 2.8 %, by bytes 5.0 %.``; what was not measured stands with the rest of it."""
    named = (("launches", "fused_launches_share"), ("bytes", "fused_bytes_share"))
    known = [(what, share) for what, name in named if (share := result.metric(name)) is not None]
    return f"By {fmt.joined([f'{what} {fmt.share(share)}' for what, share in known])}." if known else ""


def notes(result: Result) -> list[str]:
    """What a reader must know of these numbers: only what concerns this recording."""
    if result.metric("fused_of_all_time_share") is None:
        return []
    found = [
        "Fusible: fused kernels, pointwise work, copies, gathers, norms and reductions; not plain products, "
        "convolutions, sorts and communication.",
    ]
    if by := details(result):
        found.insert(0, by)
    unknown = result.metric("unknown_time_share")
    if unknown:
        found.append(f"What kernels of {fmt.share(unknown)} of the time do is not known: they count as neither.")
    chains = result.tables.get("chains", {})
    if chains.get("chain_id"):
        found.append(
            "A chain is a run of kernels of one stream that one kernel could replace; its bytes are those of one run, "
            "the time saved is that of all runs, at most. Where too little goes to DRAM to tell, kernels that are all "
            "short may save their time but for the longest."
        )
    if "not_checked" in chains.get("read_by", ()):
        found.append("Whether anything else reads what lies between was not checked: that takes the model's graph.")
    return found


def chain_names(result: Result) -> dict[int, str]:
    """By number of the chain, what its kernels do: ``add → copy → pow → mean``."""
    found: dict[int, list[str]] = {}
    for row in rows(result.tables.get("members", {})):
        found.setdefault(row["chain_id"], []).append(printable(str(row["does"])))
    return {number: _ARROW.join(_counted(names)) for number, names in found.items()}


def _counted(names: list[str]) -> list[str]:
    """The names with runs of one as ``mul ×3``."""
    found: list[tuple[str, int]] = []
    for name in names:
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + 1)
        else:
            found.append((name, 1))
    return [name if number == 1 else f"{name} ×{number}" for name, number in found]


def longest(result: Result, most: int) -> PlainTable:
    """The chains that took most time with their names, for a short table; empty without chains."""
    table, names = result.tables.get("chains", {}), chain_names(result)
    if not table.get("chain_id"):
        return {}
    cut: dict[str, list[Any]] = {name: values[:most] for name, values in table.items()}
    return cut | {"chain": [names.get(number, "") for number in cut["chain_id"]]}


def tables(result: Result) -> dict[str, PlainTable]:
    """What stands in the section, by name of their captions."""
    verdicts, kernels = dict(result.tables.get("verdicts", {})), dict(result.tables.get("kernels", {}))
    members = dict(result.tables.get("members", {}))
    chains = dict(longest(result, len(result.tables.get("chains", {}).get("chain_id", []))))
    for table in (verdicts, kernels, members):
        if "verdict" in table:
            table["verdict"] = [FUSION_VERDICTS.get(verdict, verdict) for verdict in table["verdict"]]
    for table in (kernels, chains):
        if "bytes_from" in table:
            table["bytes_from"] = [BYTES_FROM.get(source, source) for source in table["bytes_from"]]
    if chains:
        chains["chain"] = [
            f"{number}: {clip(name, _MAX_CHAIN_CHARS)}"
            for number, name in zip(chains["chain_id"], chains["chain"], strict=True)
        ]
        chains["saving_from"] = [SAVING_FROM.get(why, why) for why in chains["saving_from"]]
        if set(chains["read_by"]) == {"not_checked"}:  # the notes say so
            del chains["read_by"]
        else:
            chains["read_by"] = [READ_BY.get(answer, answer) for answer in chains["read_by"]]
    return {
        "fusion-chains": _kept(chains, _CHAIN_COLUMNS),
        "fusion-members": _kept(members, _MEMBER_COLUMNS),
        "fusion-verdicts": verdicts,
        "fusion-kernels": _kept(kernels, _KERNEL_COLUMNS),
    }


def _kept(table: PlainTable, columns: tuple[str, ...]) -> PlainTable:
    """The given columns, without those that have no value anywhere."""
    return {name: table[name] for name in columns if any(cell not in (None, "") for cell in table.get(name, ()))}


def print_section(screen: Screen, report: Report) -> None:
    """How much is fused, and the chains that took most time; nothing where no kernel ran."""
    result = report.result("fusion-coverage")
    text = summary(result) if result else ""
    if result is None or not text:
        return
    screen.heading("Fusion")
    screen.prose(f"{text}. {details(result)}".strip(), "dim")
    entries = rows(longest(result, _MAX_CHAINS))
    if entries:
        names = [str(entry["chain"]) for entry in entries]
        columns = measured(_SCREEN_COLUMNS, entries)
        print_table(screen, "Chain", columns, entries, partial(clipped, names), "gpu_time_share")
