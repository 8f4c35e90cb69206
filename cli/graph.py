"""``spikeprof graph``: the static graph of a model, what its tensors need and what its nodes take."""

from __future__ import annotations

import shlex
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spikeprof.profiler.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from spikeprof.profiler.collectors.model_graph.collect import Read
    from spikeprof.profiler.trace import Trace

MAX_RUNS = 10_000


class Via(StrEnum):
    """How a model becomes a graph."""

    auto = "auto"
    export = "export"
    fx = "fx"


def graph(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="package.module:function or path/file.py:function that returns (model, args) or"
            " (model, args, kwargs); or a graph as JSON (.json).",
            show_default=False,
        ),
    ],
    via: Annotated[
        Via, typer.Option("--via", help="torch.export, torch.fx, or auto: fx where export refuses.")
    ] = Via.auto,
    runs: Annotated[int, typer.Option(metavar="N", help="Time every node N times, after warm-up.")] = 10,
    no_time: Annotated[bool, typer.Option("--no-time", help="Only read the graph; run nothing.")] = False,
    python: Annotated[
        str, typer.Option(metavar="PYTHON", help="The Python that has torch and the model [this one].")
    ] = "",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Write a trace folder with the graph, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Read a model's graph: order, lifetimes and peak of its tensors, alignment, and the time of each node.

    What the factory prints goes to standard error. Example: spikeprof graph examples/graph_factory.py:decoder
    """
    if not 0 < runs <= MAX_RUNS:
        raise UsageError(f"--runs {runs}: must be from 1 to {MAX_RUNS}; --no-time runs nothing")
    from spikeprof.profiler import store

    if output is not None:
        store.create_folder(output)
    began_ns = time.time_ns()
    try:
        read = _read(source, via.value, 0 if no_time else runs, python)
        trace = _trace(read, began_ns)
        if output is not None:
            store.write_trace(output, trace)
    except BaseException:
        if output is not None and output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        raise
    _print(trace, as_json)
    if output is not None and not as_json:
        typer.echo(f"\nnext: spikeprof report {shlex.quote(str(output))} -o report.html")
    return 0


def _read(source: str, via: str, runs: int, python: str) -> Read:
    from spikeprof.profiler.collectors.model_graph.collect import is_factory, read_factory

    if source.endswith(".json") and not is_factory(source):
        from spikeprof.profiler.collectors.model_graph.json_graph import read_json

        return read_json(Path(source))
    interpreter = [sys.executable]
    if python:
        from spikeprof.profiler.probes_target import interpreter_of

        interpreter = interpreter_of(shlex.split(python))
    return read_factory(source, interpreter, via, runs)


def _trace(read: Read, began_ns: int) -> Trace:
    """The graph as a trace of its own."""
    import platform

    from spikeprof import __version__
    from spikeprof.profiler.collectors.model_graph.tables import note_of, tables
    from spikeprof.profiler.trace import Manifest, Trace

    versions = {"spikeprof": __version__}
    if torch := read.facts.get("torch"):
        versions["torch"] = torch
    made: dict[str, pa.Table] = tables(read)
    return Trace(
        Manifest(
            source="spikeprof",
            t0_unix_ns=began_ns,
            duration_ns=time.time_ns() - began_ns,
            command=("spikeprof", "graph", read.name),
            host=platform.node(),
            versions=versions,
            collectors={"model_graph": note_of(read)},
        ),
        made,
    )


def _print(trace: Trace, as_json: bool) -> None:
    from spikeprof.analyzers.model_graph import ModelGraph
    from spikeprof.analyzers.runner import run_one

    result = run_one(trace, ModelGraph())
    if as_json:
        import msgspec

        answer: dict[str, Any] = {
            "graphs": trace.table("model_graphs").to_pylist(),
            "nodes": trace.table("model_nodes").to_pylist(),
            "tensors": trace.table("model_tensors").to_pylist(),
            "edges": trace.table("model_edges").to_pylist(),
            "result": result,
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=1))
        return
    from rich.console import Console

    from spikeprof.reports.model_graph_text import render_graph

    render_graph(result, Console())
