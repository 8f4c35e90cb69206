"""``spikeprof topology``: how the GPUs of this machine are joined, and what parallelism that suits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from spikeprof.profiler.errors import NoGpu

if TYPE_CHECKING:
    import pyarrow as pa

    from spikeprof.analyzers.base import Result
    from spikeprof.profiler.collectors.nvml import Gpu
    from spikeprof.profiler.trace import CollectorNote


def topology(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Copy over every link of the GPUs that CUDA shows, too: 256 MiB, one after another."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Show how the GPUs are joined: NVLink, PCIe, NUMA, P2P, rates, and the parallelism that they suit."""
    note, gpus, table = _read(measure)
    result = _answer(table)
    if as_json:
        import msgspec

        answer: dict[str, Any] = {"collector": note, "gpus": gpus, "links": table.to_pylist(), "result": result}
        typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=1))
    else:
        from rich.console import Console

        from spikeprof.reports.topology import render_topology

        render_topology(result, [gpu.name for gpu in gpus], note.reason, Console())
    return 0


def _read(measure: bool) -> tuple[CollectorNote, tuple[Gpu, ...], pa.Table]:
    """The collector's note, the GPUs and the table ``topology``. Raises NoGpu."""
    from spikeprof.profiler.collectors import copy_probe
    from spikeprof.profiler.collectors.topology import TopologyCollector

    collector = TopologyCollector()
    collector.start(0)
    copies = copy_probe.measure() if measure else None
    # Only now: PCIe links that the copies woke are read once more.
    note, tables = collector.stop()
    if "topology" not in tables:
        raise NoGpu(
            f"the links of this machine cannot be read: {note.reason}; recorded traces show theirs "
            "(`spikeprof analyze TRACE`), and `spikeprof doctor` says what is missing here"
        )
    table = tables["topology"]
    if copies is not None:
        table = copy_probe.with_copies(table, collector.gpus, copies)
    return note, collector.gpus, table


def _answer(table: pa.Table) -> Result:
    from spikeprof.analyzers.runner import run_one
    from spikeprof.analyzers.topology import Topology
    from spikeprof.profiler.trace import Manifest, Trace

    return run_one(Trace(Manifest("spikeprof", 0, 0), {"topology": table}), Topology())
