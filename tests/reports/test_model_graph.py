from __future__ import annotations

import io
import re
from typing import Any

import graphs
import pytest
from graphs import kernels, node
from reports import fabricated, test_terminal
from reports.test_html import Page
from rich.console import Console

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.model_graph import ModelGraph
from spikeprof.analyzers.runner import run_one
from spikeprof.reports import model_graph as say
from spikeprof.reports.html import render_html
from spikeprof.reports.model_graph_text import render_graph

TIMED = {
    "model": "Decoder",
    "remark": "torch.export refused: <b>why</b>",
    "device": "cuda:0",
    "device_name": "NVIDIA H200",
    "timed_with": "cuda_events",
    "runs_count": 10,
    "floor_ns": 1500.0,
    "forward_ns": 90_000.0,
    "graph_peak_bytes": 2_300_000,
    "model_peak_bytes": 2_500_000,
}


def decoder(layers: int = 12, prefix: str = "layers") -> list[dict[str, Any]]:
    """Layers of a product and its activation, in 1 MiB each; up's product takes four times as long in layer 3."""
    made = [node("x", kind="input", shape=[1 << 19])]
    for layer in range(layers):
        module = f"{prefix}.{layer}.mlp"
        latency = 40_000.0 if layer == 3 else 10_000.0
        before = made[-1]["name"]
        made.append(node(f"up_{layer}", before, module=f"{module}.up", shape=[1 << 19], latency=latency, host=5000.0))
        made.append(node(f"silu_{layer}", f"up_{layer}", module=module, shape=[1 << 19], latency=2000.0, host=4000.0))
    return [*made, node("head", made[-1]["name"], module="head", shape=[64], latency=8000.0, host=5000.0)]


def answer(nodes: list[dict[str, Any]], facts: dict[str, Any] | None = None, **more: Any) -> Result:
    return run_one(graphs.trace(nodes, TIMED if facts is None else facts, **more), ModelGraph())


def screen(result: Result, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    render_graph(result, Console(file=file, width=width, color_system=None))
    file.flush()
    return raw.getvalue().decode(encoding)


def page(result: Result) -> str:
    return render_html(fabricated.alone(result))


# -- words -----------------------------------------------------------------------------------------------------------


def test_the_whole_answer_at_80_columns() -> None:
    text = screen(answer(decoder()))
    assert text.splitlines()[:13] == [
        "Decoder from m:f",
        "25 operators (26 nodes, the longest chain 26) by torch.export",
        "torch.export refused: <b>why</b>.",
        "",
        "Memory ─────────────────────────────────────────────────────────────────────────",
        "Weights 0 B, inputs 1.00 MiB, all other tensors at most 2.00 MiB at once; a run",
        "node by node allocated 2.19 MiB (+9.7 %); the model itself 2.38 MiB.",
        "Node                       Shape     Type      Held  Of peak",
        "layers.0.mlp.up: up_0     524288  float16  1.00 MiB   50.0 % ████████",
        "layers.0.mlp: silu_0      524288  float16  1.00 MiB   50.0 % ████████",
        "",
        "Time ───────────────────────────────────────────────────────────────────────────",
        "All nodes take 182 µs on NVIDIA H200, the whole model 90.0 µs, launching them on",
    ]
    assert "layers.*.mlp.up               12     12   150 µs  82.4 % ████████" in text
    assert "layers.3.mlp.up: up_3     40.0 µs  5.00 µs   100 % ████████" in text


def test_heat_by_layer_as_text() -> None:
    lines = say.heat_lines(answer(decoder()), 80, ascii_only=False)
    assert lines == ["              0         10", "mlp.up        ▂▂▂█▂▂▂▂▂▂▂▂", "mlp           ············"]
    assert say.heat_lines(answer(decoder()), 80, ascii_only=True)[1] == "mlp.up        222922222222"


def test_layers_that_do_not_fit_are_joined_by_their_hottest() -> None:
    lines = say.heat_lines(answer(decoder(100)), 40, ascii_only=True)
    assert lines == [  # 25 times 4 layers
        "              0         40        80",
        "mlp.up        9" + "2" * 24,
        "mlp           " + "." * 25,
    ]


def test_without_layers_there_is_no_heat_by_layer() -> None:
    result = answer([node("a", latency=5.0), node("b", "a", latency=5.0)])
    assert say.heat_lines(result, 80, ascii_only=False) == []
    assert say.heat_figure(result) is None


@pytest.mark.parametrize("width", [40, 60, 80, 140])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_lines_fit_and_end_without_blanks(width: int, encoding: str) -> None:
    cycle = [node("a" * 50, "b" * 50), node("b" * 50, "a" * 50)]
    for result in (answer(decoder()), answer(decoder(200, "model.decoder.layers")), answer(cycle, {})):
        for line in screen(result, width, encoding).splitlines():
            assert len(line) <= width
            assert line == line.rstrip()


def test_what_was_not_measured_is_said() -> None:
    text = " ".join(screen(answer([node("a"), node("b", "a")], {"timed_reason": "not asked for"})).split())
    assert "? All nodes, whole model and empty node: not asked for" in text
    assert "? Peak of all other tensors: the sizes of tensors are not known" in text


def test_tensors_of_unknown_size_are_said_with_the_peak() -> None:
    nodes = [node("a", shape=[8]), node("b", "a", shape=[8], bytes=None), node("c", "b", shape=[4])]
    assert say.memory(answer(nodes, {})) == (
        "Weights 0 B, inputs 0 B, all other tensors at most 16 B at once, without 1 whose size is not known."
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.*.mlp", "layers.*", "head"], (["mlp", "itself", "head"], "layers.*")),
        (["a.*.x", "b.*.x"], (["a.*.x", "b.*.x"], "")),
        (["head"], (["head"], "")),
        ([], ([], "")),
    ],
)
def test_what_all_layers_share_is_said_once(names: list[str], expected: tuple[list[str], str]) -> None:
    assert say.short_parts(names) == expected


# -- the report of a run ---------------------------------------------------------------------------------------------


def test_a_report_has_the_graph_and_its_kernels() -> None:
    step = [("gemm", f"layers.{n}.mlp.up", "aten::mm") for n in range(12)]
    result = answer(decoder(), **kernels(*step, *step))
    text = test_terminal.screen(fabricated.alone(result))
    assert "Model graph: 25 operators (26 nodes, the longest chain 26) by torch.export" in text
    assert "Of the kernels' time 100 % could be given to nodes; heat is of that." in text
    assert re.search(r"layers.0.mlp.up: up_0 \(gemm\) +2.00 µs +10.0 µs +5.00 µs +100 % █", text)
    shown = Page(page(result)).shown
    assert "Nodes by heat" in shown
    assert "gemm" in shown


def test_the_page_draws_layers_and_memory() -> None:
    data = Page(page(answer(decoder()))).data["figures"]
    assert isinstance(data, dict)
    heat, live = data["node-heat"], data["live-bytes"]
    (cells,) = heat["data"]
    assert heat["layout"]["yaxis"]["ticktext"] == ["mlp.up", "mlp", "head"]
    assert heat["layout"]["xaxis"]["ticktext"] == ["none", *map(str, range(12))]
    assert cells["z"][0] == [None, 0.25, 0.25, 0.25, 1.0, *[0.25] * 8]
    assert cells["customdata"][0][4] == "layers.*.mlp.up, layer 3<br>40.0 µs, 100 % of the hottest"
    assert max(live["data"][0]["y"]) == 2.0  # MiB


def test_names_are_text() -> None:
    hostile = fabricated.HOSTILE[0]
    nodes = [node(hostile, module=f"layers.0.{hostile}", op=hostile, latency=5.0, shape=[1 << 21])]
    parsed = Page(page(answer(nodes, {**TIMED, "name": hostile})))
    assert all(tag not in ("img", "svg") for tag, _ in parsed.tags)
    assert hostile in parsed.shown


def test_a_trace_without_a_graph_says_what_would_read_it() -> None:
    import tiny

    result = run_one(tiny.trace(kernels=[{}]), ModelGraph())
    assert say.summary(result) == ""
    assert "spikeprof run --graph MODULE:FACTORY -- CMD" in Page(page(result)).shown
