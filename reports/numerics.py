"""Numbers that leave their format in words, tables and a figure: made from the result of the analyzer ``overflow``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spikeprof.analyzers.base import Result
from spikeprof.reports import format as fmt
from spikeprof.reports.figure_parts import THEMES, Plotly, axis, base_layout, colour_bar, row_axis, safe, wrapped
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.model import PlainTable, Report, rows
from spikeprof.reports.screen import Column, Screen, measured, print_table

_FORMATS = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}
_TENSOR_COLUMNS = ("module", "class_name", "role", "dtype", "amax_value", "headroom_bits", "real_amax_value",
                   "nan_count", "inf_count", "saturated_share", "zero_share", "subnormal_share", "smallest_value",
                   "scanned_steps_count", "bad_steps_count", "first_bad_step")  # fmt: skip
_SCREEN_COLUMNS = (
    Column("dtype", "Type", 60),
    Column("amax_value", "amax"),
    Column("headroom_bits", "Headroom"),
    Column("bad_elements_count", "Inf, NaN"),
    Column("saturated_share", "Saturated", 110),
    Column("zero_share", "Zeros", 74),
    Column("subnormal_share", "Subnormal", 94),
)
_OPERATOR_COLUMNS = ("op", "line", "tensor", "shape", "dtype", "amax_value", "nan_count", "inf_count")
_MAX_TENSORS = 8  # on a screen
#: Columns of which nothing is shown where they say the same of all tensors.
_ALIKE = {"rank": (0,), "real_amax_value": (None,), "role": ("output",), "nan_count": (0,), "inf_count": (0,),
          "bad_steps_count": (0,), "first_bad_step": (None,), "saturated_share": (0,), "subnormal_share": (0,),
          "zero_share": (0,)}  # fmt: skip
_STATES = {"fine": "fine", "first bad": "first bad", "victim": "bad after it",
           "input": "its input", "input later": "its input, when it was bad again"}  # fmt: skip
_KEPT = {"first": "", "later": " Seen in a later step, in which the module was bad again."}
_LABEL_CHARS = 34
_MOST_TICKS = 12
_SHOWN_BITS = 16  # of headroom: more is drawn alike
_MODEL = "(model)"
_ALERT_CHARS = 80
_BAD_COLOUR = "#c9433f"


def summary(result: Result) -> str:
    """``12,800 scans of 200 tensors in 64 steps; least headroom in FP16 4.21 bits``; empty without scans."""
    scans, tensors, steps, bad = (
        result.metric(f"{name}_count") for name in ("scans", "watched_tensors", "scanned_steps", "bad_tensors")
    )
    if not scans or tensors is None or steps is None:
        return ""
    looked = f"{fmt.plural(scans, 'scan')} of {fmt.plural(tensors, 'tensor')} in {fmt.plural(steps, 'step')}"
    found = f"Inf or NaN in {fmt.plural(bad, 'tensor')}" if bad else "all finite"
    return "; ".join([f"{looked}, {found}", *_headrooms(result)])


def _headrooms(result: Result) -> list[str]:
    known = [(name, result.metric(f"{dtype}_headroom_bits")) for dtype, name in _FORMATS.items()]
    return [
        f"least headroom in {name} {fmt.quantity('headroom_bits', bits)}" for name, bits in known if bits is not None
    ]


def notes(result: Result) -> list[str]:
    """What a reader must know of these numbers: only what concerns this recording."""
    if not result.metric("scans_count"):
        return []
    found = []
    around = rows(result.tables.get("around", {}))
    if first := next((row for row in around if row["state"] == "first bad"), None):
        found.append(f"The first bad value came from {printable(first['module'])}, step {fmt.count(first['step'])}.")
        found += _operator_note(rows(result.tables.get("operator", {})))
    if leak := next(iter(rows(result.tables.get("leaks", {}))), None):
        where = f"{printable(leak['module'])}, step {fmt.count(leak['step'])}"
        which = f"{leak['victim_rows']} after {leak['poisoning_rows']}"
        found.append(f"Rows of the batch turned bad after others in {where}: {which}.")
    if lost := result.metric("scans_dropped_count"):
        found.append(f"{fmt.plural(lost, 'scan was', 'scans were')} lost: what they saw is not known.")
    if changed := result.metric("changed_scans_count"):
        seen = fmt.plural(changed, "tensor was", "tensors were")
        found.append(f"{seen} scanned only after something else had written into it: the numbers are of what it wrote.")
    if result.reason:
        found.append(fmt.sentence(printable(result.reason)))
    return found


def _operator_note(table: list[dict[str, Any]]) -> list[str]:
    """``The first operator to give one: aten::exp at model.py:41, inputs' amax 12.3 (float16).``"""
    if not table:
        return []
    first = table[0]
    if not first["op"]:
        return [fmt.sentence(f"The operator in it is not known: {printable(first['why_not'])}")]
    where = f" at {printable(first['line'])}" if first["line"] else ""
    inputs = [row for row in table if row["tensor"] == "input" and row["amax_value"] is not None]
    largest = max(inputs, key=lambda row: row["amax_value"], default=None)
    took = f", inputs' amax {fmt.magnitude(largest['amax_value'])} ({printable(largest['dtype'])})" if largest else ""
    around = f", which runs before the module, in {printable(first['around'])}" if first["around"] else ""
    what = f"{printable(first['op'])}{where}{around}{took}"
    return [f"The first operator to give one: {what}.{_KEPT[first['kept']]}"]


def tables(result: Result) -> dict[str, PlainTable]:
    """What stands in the section, by name of its caption."""
    around = dict(result.tables.get("around", {}))
    around["state"] = [_STATES.get(state, state) for state in around.get("state", [])]
    operator = result.tables.get("operator", {})
    found = {
        "numerics-around": around,
        "numerics-operator": {
            name: operator.get(name, []) for name in _OPERATOR_COLUMNS if any(operator.get("op", []))
        },
        "numerics-leaks": result.tables.get("leaks", {}),
        "numerics-tensors": {name: result.tables.get("tensors", {}).get(name, []) for name in _TENSOR_COLUMNS},
        "numerics-trends": result.tables.get("trends", {}),
        "numerics-bad-steps": result.tables.get("bad_steps", {}),
    }
    return {name: _telling(table) for name, table in found.items() if any(table.values())}


def _telling(table: PlainTable) -> PlainTable:
    """The columns that say something."""
    return {name: values for name, values in table.items() if not set(values) <= set(_ALIKE.get(name, ()))}


def worst(result: Result, most: int) -> PlainTable:
    """The worst watched tensors for a short table; Inf and NaN in one column, empty where nothing was scanned."""
    table = {name: values[:most] for name, values in result.tables.get("tensors", {}).items()}
    if not table.get("module"):
        return {}
    bad = [nan + inf for nan, inf in zip(table["nan_count"], table["inf_count"], strict=True)]
    roles = ["" if role == "output" else f" ({role})" for role in table["role"]]
    module = [printable(f"{path}{role}") for path, role in zip(table["module"], roles, strict=True)]
    return table | {"module": module, "bad_elements_count": [number or None for number in bad]}


def tail(text: str, width: int) -> str:
    """The text in ``width`` characters; what is too long loses its beginning: paths of modules differ at their ends."""
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def print_section(screen: Screen, report: Report) -> None:
    """The watched tensors that are worst off; nothing where none were scanned."""
    result = report.result("overflow")
    table = worst(result, _MAX_TENSORS) if result else {}
    if result is None or not table:
        return
    screen.heading("Numerics")
    for text in (summary(result), *notes(result)):
        screen.prose(text, "dim")
    entries, names = rows(table), table["module"]
    columns = measured(_SCREEN_COLUMNS, entries)
    print_table(screen, "Module", columns, entries, lambda room: [tail(name, room) for name in names])


def alert_text(alert: Mapping[str, Any]) -> str:
    """One line: ``alert: overflow in layers.5.mlp (float16, step 24): 16 of 4,096 elements Inf or NaN``."""
    value, limit, rule = alert["value"], alert["limit"], str(alert["rule"])
    role = "" if alert["role"] in ("", "output") else f"{printable(alert['role'])}, "
    module = clip(printable(alert["module"] or _MODEL), _ALERT_CHARS)
    where = f"{module} ({role}{printable(alert['dtype'])}, step {fmt.count(alert['step'])})"
    if rule == "overflow":
        what = f"{fmt.count(value)} of {fmt.plural(alert['elements_count'], 'element')} Inf or NaN"
    elif value <= 1 and limit < 1:
        what = f"{fmt.share(value)} of the elements at the ends of the format (limit {fmt.share(limit)})"
    else:
        what = f"amax {fmt.magnitude(value)} of at most {fmt.magnitude(limit)}"
    return f"alert: {rule} in {where}: {what}"


# ---------------------------------------------------------------- modules × steps


def heat_figure(result: Result) -> Plotly | None:
    """Headroom of modules over steps; cells with Inf or NaN in red. None where nothing has a headroom."""
    table = result.tables.get("heat", {})
    if not table.get("module"):
        return None
    names = list(dict.fromkeys(table["module"]))
    steps = sorted({*zip(table["step"], table["last_step"], strict=True)})
    at_y, at_x = {name: at for at, name in enumerate(names)}, {step: at for at, (step, _) in enumerate(steps)}
    z: list[list[float | None]] = [[None] * len(steps) for _ in names]
    bad: list[list[int | None]] = [[None] * len(steps) for _ in names]
    hover = [[""] * len(steps) for _ in names]
    for row in rows(table):
        y, x = at_y[row["module"]], at_x[row["step"]]
        bits = row["headroom_bits"]
        z[y][x] = None if bits is None else round(min(max(bits, 0), _SHOWN_BITS), 3)
        bad[y][x] = 1 if row["bad_scans_count"] else None
        hover[y][x] = _hover(row)
    shared = {"x": list(range(len(steps))), "y": list(range(len(names))), "customdata": hover, "hoverongaps": False}
    shared |= {"type": "heatmap", "ygap": 1, "xgap": 1, "hovertemplate": "%{customdata}<extra></extra>"}
    marked = {"z": bad, "showscale": False, "colorscale": [[0, _BAD_COLOUR], [1, _BAD_COLOUR]]}
    return {
        "data": [shared | {"z": z, "coloraxis": "coloraxis"}, shared | marked],
        "layout": _layout(names, steps),
        "meta": {"labels": True, "even": True},
    }


def _layout(names: list[str], steps: list[tuple[int, int]]) -> Plotly:
    labels = _short(names)
    every = max(1, -(-len(steps) // _MOST_TICKS))
    ticks = list(range(0, len(steps), every))
    layout = base_layout(
        110 + 20 * len(names),
        xaxis=axis(  # the caption says what it counts: plotly puts a title between the labels of few columns
            "", tickvals=ticks, ticktext=[fmt.count(steps[at][0]) for at in ticks], showgrid=False, fixedrange=True
        ),
        yaxis=row_axis([safe(tail(printable(label), _LABEL_CHARS)) for label in labels], tickfont={"size": 11}),
        coloraxis={"colorscale": THEMES["light"]["evenscale"], "cmin": 0, "cmax": _SHOWN_BITS, "reversescale": True}
        | {"colorbar": colour_bar("headroom (bits), red: Inf or NaN", 5)},
    )
    layout["margin"] = {**layout["margin"], "t": 58}
    return layout


def _short(names: list[str]) -> list[str]:
    """``layers.7.mlp`` for ``model.decoder.layers.7.mlp``, where no two modules are called the same then."""
    short = [" to ".join(map(_from_layers, name.split(" to "))) for name in names]
    return short if len(set(short)) == len(names) else names


def _from_layers(path: str) -> str:
    words = path.split(".")
    at = next((i for i, word in enumerate(words) if word.isascii() and word.isdecimal()), 0)
    return ".".join(words[max(at - 1, 0) :])


def _hover(row: dict[str, Any]) -> str:
    first, last = row["step"], row["last_step"]
    when = f"step {fmt.count(first)}" if first == last else f"steps {fmt.count(first)} to {fmt.count(last)}"
    bits = row["headroom_bits"]
    room = f"headroom {fmt.quantity('headroom_bits', bits)}" if bits is not None else "no finite element above zero"
    bad = f"<br><b>Inf or NaN</b> in {fmt.plural(row['bad_scans_count'], 'scan')}" if row["bad_scans_count"] else ""
    return f"{wrapped(row['module'])}<br>{safe(when)}: {safe(room)}{bad}"
