"""Counters from sampling against Nsight Compute's replay, on the same kernels; and what each takes for them.

    python benchmarks/counters_vs_ncu.py [--parts mul,small,gemm,gather,decode] [--spikeprof COMMAND] [--ncu COMMAND]

The program runs once under ``spikeprof run --counters``, once under ``ncu`` with all metrics, for the time it takes,
and once under ``ncu`` with each metric alone, for the values: one pass then, nothing is replayed, and with
``--cache-control none`` caches hold what they hold in a normal run. (With all metrics each is counted in another
replay, and what fits into L2 is there already in most of them.) Launches of one kernel name, grid and block are
compared by their mean. What a kernel writes reaches DRAM later, while other kernels run, or never: reads and writes
are also compared together.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from counter_workload import DECODE_STEPS

#: Ours, and ncu's for it.
METRICS = {
    "l2_sectors_count": "lts__t_sectors.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "l1_sectors_count": "l1tex__t_sectors.sum",
}
HIT_RATE = "lts__t_sector_hit_rate.pct"

Counted = dict[tuple[str, str, str], dict[str, float]]


def counted(ncu: list[str], program: list[str], launches: int, wanted: list[str]) -> tuple[Counted, float, int]:
    """{(name, grid, block): {metric: mean}} by ncu, the seconds it took, and for how many kernels."""
    options = ["--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv"]
    count = ["--launch-count", str(launches)] if launches else []
    began = time.monotonic()
    done = subprocess.run(
        [*ncu, *options, *count, "--print-units", "base", "--metrics", ",".join(wanted), *program],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    seconds = time.monotonic() - began
    text = done.stdout[done.stdout.index('"ID"') :]
    values: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ids = set()
    for row in csv.DictReader(io.StringIO(text)):
        ids.add(row["ID"])
        key = (row["Kernel Name"], row["Grid Size"], row["Block Size"])
        values[key][row["Metric Name"]].append(float(row["Metric Value"].replace(",", "")))
    return {k: {m: statistics.mean(v) for m, v in of.items()} for k, of in values.items()}, seconds, len(ids)


def sampled(spikeprof: list[str], program: list[str], folder: Path, interval_us: float) -> None:
    """Record the program with counters."""
    options = ["--no-summary", "--capture-range", "--counters", "--counters-interval-us", f"{interval_us:g}"]
    subprocess.run([*spikeprof, "run", "-o", str(folder), *options, "--", *program], check=True)


def classes(folder: Path) -> tuple[list[dict[str, object]], int, float]:
    """One row a class: shape, duration, count, {metric: (value, low, high)}. And how many kernels, in how many ms."""
    from spikeprof import open_trace

    trace = open_trace(folder)
    span_ms = (trace.column("kernels", "end_ns").max() - trace.column("kernels", "start_ns").min()) / 1e6
    of_class = trace.table("kernel_classes").to_pylist()
    for row in of_class:
        row["counters"] = {}
    table = trace.table("counters").to_pandas()
    for row in table[table.kernel_id < 0].itertuples():
        of_class[row.class_id]["counters"][row.metric] = (row.value, row.low, row.high)
    return of_class, trace.table("kernels").num_rows, span_ms


def matching(ours: list[dict[str, object]], key: tuple[str, str, str]) -> list[dict[str, object]]:
    """Our classes that ncu's kernel may be: same grid, block and function, and template if one has the same."""
    grid, block = (tuple(int(n) for n in text.strip("()").split(",")) for text in key[1:])
    function = _plain(key[0]).split("<")[0]
    found = [
        row
        for row in ours
        if tuple(row[f"grid_{axis}"] for axis in "xyz") == grid
        and tuple(row[f"block_{axis}"] for axis in "xyz") == block
        and _plain(str(row["name"])).split("<")[0] == function
    ]
    exact = [row for row in found if _plain(str(row["name"])) == _plain(key[0])]
    return exact or found


def _plain(name: str) -> str:
    """A kernel's name without namespaces and parameters, as both tools spell it."""
    name = name.replace("true", "1").replace("false", "0")
    name = re.sub(r"\((unsigned )?(int|long|char|bool)\)|(?<=\d)ul\b|^void |\s", "", name)
    name = re.sub(r"(\w+|\(anonymousnamespace\))::", "", name)
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and not depth:
            return name[:at]
    return name


def compare(row: dict[str, object], values: dict[str, float], inside: dict[str, list[bool]]) -> None:
    """Print one class of launches, and note which of ncu's values lie inside our bounds."""
    mean_us = row["total_ns"] / max(row["launches_count"], 1) / 1e3
    head = f"{mean_us:7.1f} {row['launches_count']:8}"
    counters = row["counters"]
    for metric, theirs_name in METRICS.items():
        if metric not in counters:
            continue
        value, low, high = counters[metric]
        truth = values[theirs_name]
        kind = "20 us and more" if mean_us >= 20 else "3 to 20 us" if mean_us >= 3 else "below 3 us"
        inside[f"{metric}, {kind}"].append(low <= truth <= high)
        numbers = f"{value:14.0f} {low:14.0f} {high:14.0f} {truth:14.0f} {value / truth if truth else np.nan:7.3f}"
        print(f"{head} {metric:20} {numbers}")
    if {"dram_read_bytes", "dram_written_bytes"} <= counters.keys():
        value = counters["dram_read_bytes"][0] + counters["dram_written_bytes"][0]
        truth = values[METRICS["dram_read_bytes"]] + values[METRICS["dram_written_bytes"]]
        print(f"{head} {'read and written':20} {value:14.0f} {'':29} {truth:14.0f} {value / truth:7.3f}")
    if {"l2_sectors_count", "l2_hit_sectors_count"} <= counters.keys():
        hits, lookups = (counters[name][0] for name in ("l2_hit_sectors_count", "l2_sectors_count"))
        print(f"{head} {'L2 hit rate':20} {100 * hits / lookups:13.1f}% {'':29} {values[HIT_RATE]:13.1f}%")


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="mul,small,gemm,gather,decode")
    parser.add_argument("--repeat", type=int, default=40, help="how often the sampled run goes through the parts")
    parser.add_argument("--launches", type=int, default=0, help="kernels that ncu replays at most; 0 = all")
    parser.add_argument("--interval-us", type=float, default=10.0)
    parser.add_argument("--spikeprof", default=f"{sys.executable} -m spikeprof")
    parser.add_argument("--ncu", default="ncu")
    arguments = parser.parse_args()
    program = [sys.executable, str(Path(__file__).with_name("counter_workload.py")), "--parts", arguments.parts]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "trace"
        began = time.monotonic()
        sampled(
            arguments.spikeprof.split(), [*program, "--repeat", str(arguments.repeat)], folder, arguments.interval_us
        )
        sampled_seconds = time.monotonic() - began
        print(f"sampled run: {sampled_seconds:.1f} s in all")
        ours, kernels_count, span_ms = classes(folder)
    once = [*program, "--steps", "1"]
    ncu = arguments.ncu.split()
    names = [*METRICS.values(), HIT_RATE]
    _, seconds, kernels = counted(ncu, once, arguments.launches, names)
    each_ms = seconds / kernels * 1e3
    print(f"ncu, all metrics: {seconds:.1f} s for {kernels} kernels, {each_ms:.0f} ms each")
    if arguments.parts == "decode":
        steps = DECODE_STEPS * arguments.repeat
        of_step = kernels_count / steps
        print(
            f"a decode step of {of_step:.0f} kernels: {span_ms / steps:.2f} ms sampled, "
            f"{sampled_seconds / steps * 1e3:.2f} ms with start and analysis of {steps} steps; "
            f"replayed, {of_step * each_ms / 1e3:.1f} s: {of_step * each_ms * steps / span_ms:.0f} times as long"
        )
    theirs: Counted = defaultdict(dict)
    for name in names:
        for key, values in counted(ncu, once, arguments.launches, [name])[0].items():
            theirs[key].update(values)
    inside: dict[str, list[bool]] = defaultdict(list)
    print(f"{'us':>7} {'launches':>8} {'metric':20} {'ours':>14} {'low':>14} {'high':>14} {'ncu':>14} {'ratio':>7}")
    for key, values in theirs.items():
        found = matching(ours, key)
        if len(found) == 1:
            compare(found[0], values, inside)
    for what, hits in inside.items():
        print(f"{what}: {sum(hits)} of {len(hits)} inside the bounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
