"""Kernel time by module, operator and line in words, tables and a figure: from the analyzer ``ownership``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from spikeprof.analyzers.base import Result
from spikeprof.reports import format as fmt
from spikeprof.reports.figure_parts import PALETTE, Plotly, base_layout, safe, wrapped
from spikeprof.reports.kernel_names import clip, printable, short_name
from spikeprof.reports.model import PlainTable, Report, rows
from spikeprof.reports.screen import Column, Screen, clipped, print_table

_MODULE_COLUMNS = ("module", "class", "modules_count", "launches_count", "inclusive_ns", "inclusive_share",
                   "exclusive_ns", "exclusive_share")  # fmt: skip

_SCREEN_MODULE_COLUMNS = (
    Column("modules_count", "Modules", 70),
    Column("launches_count", "Launches", 60),
    Column("inclusive_ns", "Total"),
    Column("exclusive_ns", "Own", 94),
    Column("inclusive_share", "Share"),
)
_SCREEN_OPERATOR_COLUMNS = (
    Column("launches_count", "Launches"),
    Column("total_ns", "Total"),
    Column("gpu_time_share", "Share"),
)
_MAX_MODULES = 12  # on a screen
_MAX_OPERATORS = 6
#: Of a screen's table of modules, those with less time are left out.
_MIN_SHARE = 0.01
#: A kernel of which less than this belongs to one owner is said to be shared.
_MOSTLY = 0.95

_MATCHES = {
    "exact": "was seen at its launch",
    "graph": "belongs to nodes of CUDA graphs that were seen captured",
    "position": "is known from the same place in the same sequence of kernels",
    "signature": "from the one place that launches that kernel with that grid",
    "none": "is not known",
}

_COLOURS = {
    "module": PALETTE[0],
    "op": PALETTE[1],
    "kernel": PALETTE[2],
    "unknown": "#7d838c",
    "others": "#7d838c",
    "all": "#5c6673",
}
_FIGURE_HEIGHT = 600
_LABEL_CHARS = 48
_KERNEL_CHARS = 28  # what does not fit into a cell is not shown at all
_LEVELS = 7  # shown at once; a click on a cell shows what is in it


def summary(result: Result) -> str:
    """``module known for 97.1 % of kernel time, operator for 98.0 %, line for 97.1 %``; empty where none is known."""
    named = (("module", "owned_module_share"), ("operator", "owned_op_share"), ("line", "owned_line_share"))
    known = [(name, value) for name, metric in named if (value := result.metric(metric)) is not None]
    parts = [f"{name}{'' if i else ' known'} for {fmt.share(v)}{'' if i else ' of kernel time'}"
             for i, (name, v) in enumerate(known)]  # fmt: skip
    return ", ".join(parts) if any(value for _, value in known) else ""


def notes(result: Result) -> list[str]:
    """What a reader must know of these numbers: only what concerns this recording."""
    shares = {kind: result.metric(f"{kind}_match_share") for kind in _MATCHES}
    parts = [f"{fmt.share(share)} {_MATCHES[kind]}" for kind, share in shares.items() if share]
    if not parts or shares["none"] == 1:
        return []
    carried = any(shares[kind] for kind in ("position", "signature"))
    found = [f"Of kernel time, {fmt.joined(parts)}."]
    if carried:
        found.append("Shapes are those of launches that were seen.")
    return found


def main_modules(result: Result, most: int) -> list[dict[str, Any]]:
    """The modules that most time belongs to, with all around them, as rows in the order of the tree."""
    entries = rows(result.tables.get("modules", {}))
    kept = sorted(range(len(entries)), key=lambda i: (-entries[i]["inclusive_ns"], i))[:most]
    shown = [entries[i] for i in sorted(kept) if entries[i]["inclusive_share"] >= _MIN_SHARE]
    return [entry | {"shown": "  " * entry["depth"] + printable(entry["name"])} for entry in shown]


def main_operators(result: Result, most: int) -> list[dict[str, Any]]:
    """The operators that most time belongs to."""
    return [entry | {"shown": printable(entry["op"])} for entry in rows(result.tables.get("operators", {}))[:most]]


def tables(result: Result) -> dict[str, PlainTable]:
    """What stands in the section, by name of its captions."""
    operators, inputs, lines = (dict(result.tables.get(name, {})) for name in ("operators", "inputs", "lines"))
    if not any(operators.get("module", ())):
        operators.pop("module", None)
    if inputs:
        inputs["input_shapes"] = [shapes(text) for text in inputs["input_shapes"]]
        inputs["input_dtypes"] = [dtypes(text) for text in inputs["input_dtypes"]]
        if not any(inputs["input_dtypes"]):
            del inputs["input_dtypes"]
    if lines:
        lines["place"] = [f"{file}:{line}" for file, line in zip(lines["file"], lines["line"], strict=True)]
        lines = {n: lines[n] for n in ("place", "function", "launches_count", "total_ns", "gpu_time_share")}
    return {
        "ownership-modules": _modules(result),
        "ownership-operators": operators,
        "ownership-inputs": inputs,
        "ownership-lines": lines,
    }


def _modules(result: Result) -> PlainTable:
    """The tree of modules."""
    table = result.tables.get("modules", {})
    return {name: table[name] for name in _MODULE_COLUMNS} if table.get("module") else {}


def shapes(text: str) -> str:
    """``[[4, 128], [], [[2], [3]], []]`` -> ``4×128, –, (2, 3)``: numbers have no shape, and those at the end no place.

    Other text stays as it is, on one line.
    """
    return _listed(text, _shape)


def dtypes(text: str) -> str:
    """``["c10::BFloat16", ""]`` -> ``BFloat16, –``; other text as it is, on one line."""
    return _listed(text, lambda value: str(value).removeprefix("c10::") or fmt.ABSENT)


def _listed(text: str, one: Any) -> str:
    try:
        values = json.loads(text) if text else []
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list):
        return printable(" ".join(text.split()))
    parts = [one(value) for value in values]
    while parts and parts[-1] == fmt.ABSENT:
        parts.pop()
    return printable(", ".join(parts))


def _shape(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    if any(isinstance(inner, list) for inner in value):
        return f"({', '.join(_shape(inner) for inner in value)})"
    return "×".join(map(str, value)) or fmt.ABSENT


def owners(result: Result | None) -> dict[str, tuple[str, str, float]]:
    """By kernel: the module and operator that most of its time belongs to (empty = not known), and how much of it."""
    table = result.tables.get("kernels", {}) if result else {}
    names = ("kernel", "module", "op", "owner_share")
    if any(name not in table for name in names):
        return {}
    return {kernel: (module, op, part) for kernel, module, op, part in zip(*(table[n] for n in names), strict=True)}


def owner(found: tuple[str, str, float], width: int) -> str:
    """``layers.*.mlp.up · aten::mm``, with the share of the kernel's time where it has other owners too."""
    module, op, part = found
    names = [printable(name) for name in (module, op) if name]
    if not names:
        return ""
    more = f" ({fmt.share(part)} of it)" if part < _MOSTLY else ""
    if len(names) == 2:  # the operator whole, if it leaves the module half the room
        more = f" · {clip(names[1], (width - len(more)) // 2)}{more}"
    return clip(names[0], width - len(more)) + more


def figure(result: Result) -> Plotly | None:
    """Modules, in them operators, in them kernels: as wide as their time. Nothing of the names is markup."""
    table = result.tables.get("icicle", {})
    if len(table.get("cell_id", ())) < 2:
        return None
    trace = {
        "type": "icicle",
        "ids": [f"c{i}" for i in table["cell_id"]],
        "parents": [f"c{i}" if i >= 0 else "" for i in table["parent_id"]],
        "labels": [safe(_label(row)) for row in rows(table)],
        "values": list(table["total_ns"]),
        "branchvalues": "total",
        "customdata": [_hover(row) for row in rows(table)],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"colors": [_COLOURS.get(kind, _COLOURS["others"]) for kind in table["kind"]], "line": {"width": 1}},
        "leaf": {"opacity": 1},
        "tiling": {"orientation": "v", "pad": 1},
        "pathbar": {"thickness": 22},
        "textfont": {"color": "#ffffff", "size": 12},
        "insidetextfont": {"color": "#ffffff"},
        "maxdepth": _LEVELS,
        "sort": False,
    }
    layout = base_layout(_FIGURE_HEIGHT, uniformtext={"minsize": 10, "mode": "hide"})
    layout["margin"] = {"l": 8, "r": 8, "t": 30, "b": 8}
    return {"data": [trace], "layout": layout, "meta": {"tree": True}}


def _label(row: dict[str, Any]) -> str:
    kind, label = row["kind"], str(row["label"])
    if kind == "kernel":
        return short_name(label, _KERNEL_CHARS)
    if kind == "others":
        return f"{label} smaller"
    return {"all": "all kernels", "unknown": "module not known"}.get(kind) or clip(label, _LABEL_CHARS)


def _hover(row: dict[str, Any]) -> str:
    kinds = {"module": "module", "op": "operator", "kernel": "kernel"}
    name = wrapped(str(row["full"])) if row["full"] else safe(_label(row))
    kind = f"{kinds[row['kind']]} " if row["kind"] in kinds else ""
    return f"{kind}{name}<br>{fmt.duration(row['total_ns'])}, {fmt.share(row['gpu_time_share'])} of kernel time"


def truth(result: Result | None) -> str:
    """What the truth line says of owners; empty where they are not known."""
    share = result.metric("owned_module_share") if result else None
    return f"the module is known for {fmt.share(share)} of kernel time" if share is not None else ""


def print_section(screen: Screen, report: Report) -> None:
    """Kernel time by module, else by operator; nothing where neither is known."""
    result = report.result("ownership")
    text = summary(result) if result else ""
    if result is None or not text:
        return
    modules, operators = main_modules(result, _MAX_MODULES), main_operators(result, _MAX_OPERATORS)
    screen.heading("Time by module" if modules else "Time by operator")
    screen.prose(text, "dim")
    if modules:
        _print(screen, "Module", _SCREEN_MODULE_COLUMNS, modules, "inclusive_share")
    elif operators:
        _print(screen, "Operator", _SCREEN_OPERATOR_COLUMNS, operators, "gpu_time_share")


def _print(screen: Screen, first: str, columns: Sequence[Column], entries: list[dict[str, Any]], bar_of: str) -> None:
    names = [str(entry["shown"]) for entry in entries]
    print_table(screen, first, columns, entries, partial(clipped, names), bar_of)
