"""What watches a run from outside: which collectors there are, and what becomes of what they collect."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spikeprof.profiler.errors import OutputError, SpikeprofError
from spikeprof.profiler.trace import CollectorNote

if TYPE_CHECKING:
    import pyarrow as pa

    from spikeprof.profiler.collectors import Collector
    from spikeprof.profiler.session import RunOptions

Progress = Callable[[str, int, int], None]  # what, done, of how much


def collectors_for(options: RunOptions, spool: Path) -> list[Collector]:
    """What watches from outside, in the order in which it starts. The last one follows the thread that starts it."""
    from spikeprof.profiler.collectors import pm_files
    from spikeprof.profiler.collectors.gpm import GpmCollector
    from spikeprof.profiler.collectors.nvml import NvmlCollector
    from spikeprof.profiler.collectors.perf_events import PerfEventsCollector
    from spikeprof.profiler.collectors.pm_sampling import PmSamplingCollector, machine_gpus, visible_gpus
    from spikeprof.profiler.collectors.topology import TopologyCollector

    found: list[Collector] = [TopologyCollector()]
    if options.nvml_interval_ms:
        found += [NvmlCollector(interval_ms=options.nvml_interval_ms), GpmCollector(options.nvml_interval_ms)]
    if options.counters:
        folder = spool / pm_files.FOLDER
        folder.mkdir(mode=0o700)
        gpus = machine_gpus()
        pm_files.write_gpus(folder, {gpu.uuid: gpu.index for gpu in gpus})
        interval_ns, limit = options.counters_interval_ns, options.counters_samples
        found.append(PmSamplingCollector(visible_gpus(gpus), options.counters, interval_ns, folder, limit))
    if options.cpu_counters:
        found.append(PerfEventsCollector())
    return found


@dataclass
class Collected:
    """What the collectors handed over; ``ordinals`` numbers the GPUs that NVML saw, by UUID."""

    notes: dict[str, CollectorNote] = field(default_factory=dict)
    tables: dict[str, pa.Table] = field(default_factory=dict)
    ordinals: dict[str, int] = field(default_factory=dict)
    driver_version: str = ""


def stop_all(collectors: Sequence[Collector]) -> Collected:
    """Stop them in reverse order, and put together what they hand over."""
    from spikeprof.profiler.collectors.nvml import NvmlCollector
    from spikeprof.profiler.collectors.sampling import joined_samples
    from spikeprof.profiler.collectors.topology import TopologyCollector

    collected = Collected()
    samples = []
    for collector in reversed(collectors):
        note, tables = collector.stop()
        collected.notes[collector.name] = note
        if "samples" in tables:
            samples.append(tables.pop("samples"))
        collected.tables.update(tables)
        if isinstance(collector, NvmlCollector | TopologyCollector):
            collected.ordinals |= {gpu.uuid: gpu.index for gpu in collector.gpus}
        if isinstance(collector, NvmlCollector):
            collected.driver_version = collector.driver_version
    if samples:
        collected.tables["samples"] = joined_samples(samples)
    return collected


def gpu_numbers(spool: Path, collected: Collected) -> dict[str, int]:
    """The number of each GPU, by UUID, as the samples of this run have it: from its collectors, else from its spool."""
    from spikeprof.profiler.collectors import pm_files

    return collected.ordinals or pm_files.read_gpus(spool / pm_files.FOLDER)


def attribute_counters(
    spool: Path, folder: Path, t0_unix_ns: int, collected: Collected, progress: Progress | None
) -> list[str]:
    """Make tables of the samples in a run's spool, beside those of its kernels, and complete the collector's note.

    Returns what the user should be told at once. A fault of this costs no other table; raises OutputError.
    """
    from spikeprof.profiler.collectors import pm_files

    samplers = pm_files.read(spool / pm_files.FOLDER)
    note = collected.notes.get("pm_sampling")
    if note is None and not samplers:
        return []
    from spikeprof.profiler.assemble.counter_build import assemble_counters
    from spikeprof.profiler.collectors.pm_sampling import note_of

    note = note or note_of(samplers, ["the recording was cut off"])
    if progress:
        progress("attributing counters", 0, 1)
    try:
        note = assemble_counters(samplers, folder, t0_unix_ns, note)
    except OutputError:
        raise
    except Exception as error:
        note = dataclasses.replace(note, state="degraded", reason=f"not attributed: {type(error).__name__}: {error}")
    if progress:
        progress("attributing counters", 1, 1)
    collected.notes["pm_sampling"] = note
    return [f"no counters were sampled: {note.reason}"] if note.state == "refused" else []


def read_graph(
    factory: str, folder: Path, command: Sequence[str], collected: Collected, progress: Progress | None
) -> list[str]:
    """Read the static graph of a model in the Python of the command, beside the tables of the run.

    Returns what the user should be told at once. A fault of this, or an interrupt, costs nothing that was recorded;
    raises OutputError.
    """
    from spikeprof.profiler import store
    from spikeprof.profiler.collectors.model_graph.collect import read_factory
    from spikeprof.profiler.collectors.model_graph.tables import note_of, tables

    if progress:
        progress("reading the graph", 0, 1)
    try:
        read = read_factory(factory, _interpreter(command))
        note = note_of(read)
        for name, table in tables(read).items():
            store.write_table(folder, name, table)
    except OutputError:
        raise
    except KeyboardInterrupt:
        note = CollectorNote("refused", f"{factory}: interrupted")
    except SpikeprofError as error:
        note = CollectorNote("refused", str(error).removeprefix("no graph: "))
    except Exception as error:
        note = CollectorNote("refused", f"{factory}: {type(error).__name__}: {error}")
    if progress:
        progress("reading the graph", 1, 1)
    collected.notes["model_graph"] = note
    return [f"the model's graph was not read: {note.reason}"] if note.state == "refused" else []


def _interpreter(command: Sequence[str]) -> list[str]:
    """The Python that the command starts, where it says which; else ours."""
    from spikeprof.profiler.probes_target import interpreter_of

    try:
        return interpreter_of(list(command))
    except (SpikeprofError, OSError):
        return [sys.executable]
