"""A model's graph in words, tables and figures: made from the result of the analyzer ``model-graph``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spikeprof.analyzers.base import Result
from spikeprof.reports import format as fmt
from spikeprof.reports.figure_parts import (
    PALETTE,
    PERCENT_TICKS,
    THEMES,
    Plotly,
    axis,
    base_layout,
    colour_bar,
    row_axis,
    safe,
    wrapped,
)
from spikeprof.reports.kernel_names import clip, printable, short_name
from spikeprof.reports.model import PlainTable

_WAYS = {"export": "torch.export", "fx": "torch.fx", "json": "a JSON file"}
_CLOCKS = {"cuda_events": "CUDA events", "host_clock": "the host's clock"}
_OUTSIDE = -1  # the layer of what is in none
_LABEL_CHARS = 34
_KERNEL_CHARS = 30
_MOST_TICKS = 24
_SHADES = "·▁▂▃▄▅▆▇█"
_SHADES_ASCII = ".123456789"
_MEMORY = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def title(result: Result) -> str:
    """``Decoder from examples/graph_factory.py:decoder``."""
    model, name = (_fact(result, key) for key in ("model", "name"))
    return f"{model} from {name}" if model and name else model or name or "A model's graph"


def summary(result: Result) -> str:
    """``245 operators (312 nodes, the longest chain 201) by torch.export``; empty without a graph."""
    operators, nodes = result.metric("operators_count"), result.metric("nodes_count")
    if operators is None or nodes is None:
        return ""
    chain = result.metric("chain_nodes_count")
    longest = f", the longest chain {fmt.count(chain)}" if chain is not None else ""
    way = _WAYS.get(_fact(result, "via"), "")
    return f"{fmt.plural(operators, 'operator')} ({fmt.plural(nodes, 'node')}{longest})" + (f" by {way}" if way else "")


def memory(result: Result) -> str:
    """What weights, inputs and activations hold, and what was measured; empty where it is not known."""
    known = {
        name: result.metric(f"{name}_bytes")
        for name in ("weights", "inputs", "activations_peak", "measured_graph_peak", "measured_model_peak")
    }
    if known["weights"] is None or known["inputs"] is None:
        return ""
    parts = [f"Weights {fmt.size(known['weights'])}, inputs {fmt.size(known['inputs'])}"]
    if known["activations_peak"] is None:
        return f"{parts[0]}; the sizes of other tensors are not known."
    parts[0] += f", all other tensors at most {fmt.size(known['activations_peak'])} at once"
    if unknown := result.metric("tensors_of_unknown_size_count"):
        parts[0] += f", without {fmt.count(unknown)} whose size is not known"
    difference = result.metric("peak_difference_share")
    if known["measured_graph_peak"] is not None:
        how = f" ({fmt.change(difference)})" if difference is not None else ""
        parts.append(f"a run node by node allocated {fmt.size(known['measured_graph_peak'])}{how}")
    if known["measured_model_peak"] is not None:
        parts.append(f"the model itself {fmt.size(known['measured_model_peak'])}")
    return "; ".join(parts) + "."


def times(result: Result) -> str:
    """What the nodes take together, beside the whole model; empty where nothing was timed."""
    nodes, forward, floor = (result.metric(name) for name in ("nodes_latency_ns", "forward_ns", "floor_ns"))
    if nodes is None:
        return ""
    where = _fact(result, "device_name") or _fact(result, "device")
    clock = _CLOCKS.get(_fact(result, "timed_with"), "")
    runs = fmt.plural(_number(result, "runs_count"), "run")
    parts = [f"All nodes take {fmt.duration(nodes)}" + (f" on {where}" if where else "")]
    if forward is not None:
        parts.append(f"the whole model {fmt.duration(forward)}")
    if (host := result.metric("nodes_host_ns")) is not None:
        parts.append(f"launching them on the host {fmt.duration(host)}")
    text = f"{', '.join(parts)}: medians of {runs}" + (f", by {clock}" if clock else "") + "."
    return text + (f" A node that does nothing reads {fmt.duration(floor)}." if floor is not None else "")


def joined(result: Result) -> str:
    """How much of the kernels' time has a node; empty where there are no kernels with modules."""
    share = result.metric("joined_time_share")
    return "" if share is None else f"Of the kernels' time {fmt.share(share)} could be given to nodes; heat is of that."


def remark(result: Result) -> str:
    """What limits the graph, as a sentence."""
    reason = printable(result.reason)
    if not reason or result.status not in ("ok", "findings"):
        return ""
    return f"{reason}." if reason.startswith("torch.") else fmt.sentence(reason)


def notes(result: Result) -> list[str]:
    """What a reader must know of these numbers."""
    return [text for text in (memory(result), times(result), joined(result), remark(result)) if text]


def tables(result: Result) -> dict[str, PlainTable]:
    """What stands in the section, by name of its caption."""
    found = {
        "graph-cycle": result.tables.get("cycle", {}),
        "graph-peak": result.tables.get("peak_tensors", {}),
        "graph-nodes": result.tables.get("nodes", {}),
        "graph-parts": result.tables.get("parts", {}),
        "graph-unaligned": result.tables.get("unaligned", {}),
    }
    return {name: table for name, table in found.items() if any(table.values())}


def in_module(row: Mapping[str, Any], name: str) -> str:
    """``layers.0.up: linear (gemm)``: what a row is about, with its module and kernel where it has them."""
    module, kernel = (printable(str(row.get(key) or "")) for key in ("module", "kernel"))
    text = printable(str(row[name]))
    return (f"{module}: " if module else "") + text + (f" ({short_name(kernel, _KERNEL_CHARS)})" if kernel else "")


def _fact(result: Result, name: str) -> str:
    values = result.tables.get("graph", {}).get(name, [])
    return printable(str(values[0])) if values and values[0] is not None else ""


def _number(result: Result, name: str) -> int:
    values = result.tables.get("graph", {}).get(name, [])
    return values[0] if values and isinstance(values[0], int) else 0


# ---------------------------------------------------------------- layers × parts


def heat_rows(result: Result) -> tuple[list[int], dict[str, dict[int, int]]]:
    """(layers in order, part -> layer -> row of the table ``heat``); nothing where no part has layers."""
    table = result.tables.get("heat", {})
    layers = sorted({*table.get("layer", [])})
    if not any(layer != _OUTSIDE for layer in layers):
        return [], {}
    found: dict[str, dict[int, int]] = {}
    for row, (part, layer) in enumerate(zip(table["part"], table["layer"], strict=True)):
        found.setdefault(part, {})[layer] = row
    return layers, found


def short_parts(names: list[str]) -> tuple[list[str], str]:
    """(names, what stands before each): the stack that all layered parts share is said once, as ``model.layers.*``."""
    stacks = {name[: name.index("*") + 1] for name in names if "*" in name}
    if len(stacks) != 1:
        return names, ""
    (stack,) = stacks
    cut = [name.removeprefix(stack).removeprefix(".") if "*" in name else name for name in names]
    return [name or "itself" for name in cut], stack


def stack_of(result: Result) -> str:
    """`` of layers.*``: what all layers belong to; empty where they belong to several."""
    stack = short_parts(list(heat_rows(result)[1]))[1]
    return f" of {printable(stack)}" if stack else ""


def heat_lines(result: Result, width: int, ascii_only: bool) -> list[str]:
    """Layers × parts as text: a character per layer, from a dot to a full block for the hottest there."""
    layers, cells = heat_rows(result)
    numbered = [layer for layer in layers if layer != _OUTSIDE]
    if not numbered:
        return []
    times = result.tables["heat"]["total_ns"]
    hottest = max((times[row] for found in cells.values() for layer, row in found.items() if layer != _OUTSIDE)) or 1
    names, _ = short_parts(list(cells))
    room = max(12, min(max(map(len, names)), width // 2))
    together = -(-len(numbered) // max(width - room - 2, 1))
    groups = [numbered[at : at + together] for at in range(0, len(numbered), together)]
    lines = [f"{'':{room}}  {_ruler(groups)}".rstrip()]
    shades = _SHADES_ASCII if ascii_only else _SHADES
    for name, part in zip(names, cells, strict=True):
        found = cells[part]
        if set(found) == {_OUTSIDE}:
            continue
        most = [max((times[found[layer]] for layer in group if layer in found), default=None) for group in groups]
        cell = "".join(" " if value is None else _shade(value / hottest, shades) for value in most)
        lines.append(f"{clip(name, room):{room}}  {cell}".rstrip())
    return lines


def _ruler(groups: list[list[int]]) -> str:
    """Numbers of layers above the characters, every tenth."""
    text = ""
    for at in range(0, len(groups), 10):
        text = text.ljust(at) + str(groups[at][0])
    return text


def _shade(share: float, shades: str) -> str:
    return shades[min(int(share * len(shades)), len(shades) - 1)]


def heat_figure(result: Result) -> Plotly | None:
    """Layers × parts as a heatmap; None without layers."""
    layers, cells = heat_rows(result)
    if not layers:
        return None
    table = result.tables["heat"]
    names, stack = short_parts(list(cells))
    z: list[list[float | None]] = []
    hover: list[list[str]] = []
    for part, found in cells.items():
        rows = [found.get(layer) for layer in layers]
        z.append([None if row is None else round(table["heat_share"][row], 5) for row in rows])
        hover.append([_hover(part, layer, row, table) for layer, row in zip(layers, rows, strict=True)])
    step = max(1, -(-len(layers) // _MOST_TICKS))
    ticks = list(range(0, len(layers), step))
    bar = colour_bar("share of the hottest", 6, tickformat=PERCENT_TICKS)
    trace = {
        "type": "heatmap",
        "x": list(range(len(layers))),
        "y": list(range(len(names))),
        "z": z,
        "customdata": hover,
        "coloraxis": "coloraxis",
        "xgap": 1 if len(layers) <= 64 else 0,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    layout = base_layout(
        104 + 22 * len(names),
        xaxis=axis(f"layer of {stack}" if stack else "layer", tickvals=ticks, showgrid=False, fixedrange=True)
        | {"ticktext": ["none" if layers[at] == _OUTSIDE else str(layers[at]) for at in ticks]},
        yaxis=row_axis([safe(clip(printable(name), _LABEL_CHARS)) for name in names], tickfont={"size": 11}),
        coloraxis={"colorscale": THEMES["light"]["colorscale"], "cmin": 0, "cmax": 1, "colorbar": bar},
    )
    layout["margin"] = {**layout["margin"], "t": 54}
    return {"data": [trace], "layout": layout, "meta": {"labels": True}}


def _hover(part: str, layer: int, row: int | None, table: PlainTable) -> str:
    if row is None:
        return ""
    where = "" if layer == _OUTSIDE else f", layer {layer}"
    amount = f"{fmt.duration(table['total_ns'][row])}, {fmt.share(table['heat_share'][row])} of the hottest"
    return f"{wrapped(part)}{where}<br>{safe(amount)}"


def live_figure(result: Result) -> Plotly | None:
    """Memory held while each node runs; None where it is not known."""
    table = result.tables.get("live", {})
    held: list[Any] = table.get("live_bytes", [])
    if not any(held):
        return None
    divisor, unit = next((step for step in _MEMORY if max(held) >= step[0]), _MEMORY[-1])
    trace = {
        "type": "scatter",
        "mode": "lines",
        "line": {"color": PALETTE[0], "width": 1.6, "shape": "hv"},
        "fill": "tozeroy",
        "fillcolor": "rgba(58,128,196,0.18)",
        "x": table["position"],
        "y": [round(n / divisor, 4) for n in held],
        "customdata": [fmt.size(n) for n in held],
        "hovertemplate": "node %{x}: %{customdata}<extra></extra>",
    }
    layout = base_layout(
        240,
        showlegend=False,
        xaxis=axis("node, in the order in which they run", showgrid=False, ticks="outside"),
        yaxis=axis(f"held ({unit})", rangemode="tozero", fixedrange=True),
    )
    layout["margin"] = {**layout["margin"], "l": 70, "t": 20}
    return {"data": [trace], "layout": layout, "meta": {}}
