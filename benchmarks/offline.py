"""How long a recording takes to become a report, and how large its trace is: needs no GPU.

``python benchmarks/offline.py --kernels 1000000`` makes a synthetic spool (``synthetic_spool.py``), then
assembles, analyses and renders it in a child process, as many times as asked, and prints the medians: seconds
on the clock and of CPU per stage, peak memory of the child, bytes on disk per kernel by table.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What must hold for a million kernels.
SECONDS_MAX, PEAK_BYTES_MAX, BYTES_PER_KERNEL_MAX = 10.0, 1_000_000_000, 24.0


def run_stages(spool: Path, folder: Path) -> dict[str, Any]:
    """Everything from the end of recording to the page, in this process."""
    stages: dict[str, dict[str, float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        stages[name] = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        return result

    trace = folder / "trace"
    kernels_count = timed("assemble", lambda: _assemble(spool, trace))
    report = timed("analyze", lambda: _analyze(trace))
    timed("terminal", lambda: _terminal(report))
    page = folder / "report.html"
    timed("html", lambda: _html(report, page))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "kernels_count": kernels_count,
        "stages": stages,
        "peak_bytes": usage.ru_maxrss * 1024,
        "page_bytes": page.stat().st_size,
        "findings_count": sum(len(result.findings) for result in report.results),
        "errors": [f"{r.analyzer}: {r.reason}" for r in report.results if r.status == "error"],
        "bytes_per_kernel": {
            path.stem: path.stat().st_size / kernels_count for path in sorted(trace.glob("*")) if path.is_file()
        },
    }


def _assemble(spool: Path, trace: Path) -> int:
    from synthetic_spool import T0_UNIX_NS

    from spikeprof.profiler import store
    from spikeprof.profiler.assemble.build import assemble
    from spikeprof.profiler.trace import Manifest

    store.create_folder(trace)
    built = assemble(spool, trace, T0_UNIX_NS)
    manifest = Manifest(
        "spikeprof", T0_UNIX_NS, built.end_ns, versions=built.versions, collectors={"activity": built.note}
    )
    store.write_manifest(trace, manifest)
    assert not built.note.set_aside_count, built.note
    return built.kernels_count


def _analyze(trace: Path) -> Any:
    from spikeprof.profiler.importers import open_trace
    from spikeprof.reports.build import build_report

    return build_report(open_trace(trace), trace.name)


def _terminal(report: Any) -> None:
    import io

    from rich.console import Console

    from spikeprof.reports.terminal import render_terminal

    render_terminal(report, Console(file=io.StringIO(), width=80))


def _html(report: Any, page: Path) -> None:
    from spikeprof.reports.html import write_html

    write_html(report, page)


def measure(spool: Path, repeats: int) -> dict[str, Any]:
    """Medians over ``repeats`` child processes."""
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="spikeprof-bench-", dir=spool.parent) as folder:
            began = time.perf_counter()
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            child = [sys.executable, __file__, "--child", str(spool), folder]
            done = subprocess.run(child, check=True, stdout=subprocess.PIPE)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            run = json.loads(done.stdout)
            run["wall_s"] = time.perf_counter() - began
            run["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            runs.append(run)
    result: dict[str, Any] = dict(runs[0])
    for key in ("wall_s", "cpu_s", "peak_bytes"):
        result[key] = statistics.median(run[key] for run in runs)
    for name, stage in result["stages"].items():
        for key in stage:
            stage[key] = statistics.median(run["stages"][name][key] for run in runs)
    result["repeats_count"] = repeats
    result["trace_bytes_per_kernel"] = sum(result["bytes_per_kernel"].values())
    return result


def _print(result: dict[str, Any], title: str) -> None:
    print(f"{title}: {result['kernels_count']:,} kernels, median of {result['repeats_count']}")
    print(f"  {'stage':<28}{'clock s':>9}{'CPU s':>9}{'peak MB so far':>16}")
    for name, stage in result["stages"].items():
        print(f"  {name:<28}{stage['wall_s']:>9.2f}{stage['cpu_s']:>9.2f}{stage['peak_bytes'] / 1e6:>16.0f}")
    print(f"  {'whole process':<28}{result['wall_s']:>9.2f}{result['cpu_s']:>9.2f}{result['peak_bytes'] / 1e6:>16.0f}")
    print(f"  {'file':<28}{'bytes/kernel':>12}")
    for name, size in sorted(result["bytes_per_kernel"].items(), key=lambda item: -item[1]):
        if size >= 0.005:
            print(f"  {name:<28}{size:>12.2f}")
    print(f"  {'trace folder':<28}{result['trace_bytes_per_kernel']:>12.2f}")
    print(f"  {'page, MB':<28}{result['page_bytes'] / 1e6:>12.2f}")
    for error in result["errors"]:
        print(f"  error in {error}")


def _missed(result: dict[str, Any]) -> list[str]:
    """The limits that do not hold, scaled to a million kernels where they grow with the number."""
    scale = result["kernels_count"] / 1e6
    limits = (
        ("seconds from stop to page", result["wall_s"], SECONDS_MAX * max(scale, 0.5)),
        ("peak bytes", result["peak_bytes"], PEAK_BYTES_MAX * max(scale, 1.0)),
        ("bytes per kernel", result["trace_bytes_per_kernel"], BYTES_PER_KERNEL_MAX),
    )
    return [f"{name}: {value:,.1f}, limit {limit:,.1f}" for name, value, limit in limits if value > limit]


def main() -> int:
    """Measure and print; exit code 1 when a limit does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--mode", choices=("eager", "graph", "both"), default="both")
    parser.add_argument("--processes", type=int, default=1, help="the kernels are shared out over so many processes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("SPOOL", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_stages(*map(Path, options.child))))
        return 0
    from synthetic_spool import write_spool

    results = {}
    for mode in ("eager", "graph") if options.mode == "both" else (options.mode,):
        with tempfile.TemporaryDirectory(prefix="spikeprof-bench-") as folder:
            spool = Path(folder) / "spool"
            spool.mkdir()
            for rank in range(options.processes):
                write_spool(spool, options.kernels // options.processes, graph=mode == "graph", rank=rank)
            results[mode] = measure(spool, options.repeats)
        if not options.json:
            _print(results[mode], f"{mode}, {options.processes} process(es)")
    if options.json:
        print(json.dumps(results, indent=1))
    missed = [f"{mode}: {line}" for mode, result in results.items() for line in _missed(result)]
    for line in missed:
        print(f"limit missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
