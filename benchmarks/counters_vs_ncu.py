"""Counters from sampling against Nsight Compute's replay, on the same kernels; and what each takes for them.

    python benchmarks/counters_vs_ncu.py [--parts mul,small,gemm,gather,decode] [--spikeprof COMMAND] [--ncu COMMAND]

The program runs once under ``spikeprof run --counters`` and once under ``ncu``. Launches of one kernel name, grid and
block are compared by their mean. ncu keeps caches as they are (``--cache-control none``), as a normal run does; still
its replays leave other data there, so DRAM traffic of kernels that fit into L2 is not comparable, and is left out.
"""

from __future__ import annotations

import argparse
import csv
import io
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
#: A kernel that moves less than this share of L2 lookups from DRAM lives in L2.
_DRAM_SHARE_MIN = 0.05

Replayed = dict[tuple[str, str, str], dict[str, float]]


def replayed(
    ncu: list[str], program: list[str], launches: int
) -> tuple[dict[tuple[str, str, str], dict[str, float]], float, int]:
    """{(name, grid, block): {metric: mean}} by ncu, the seconds it took, and the kernels it replayed."""
    wanted = [*METRICS.values(), HIT_RATE]
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


def classes(folder: Path) -> list[dict[str, object]]:
    """One row for each class of launches: shape, duration, count, {metric: (value, low, high)}."""
    from spikeprof import open_trace

    trace = open_trace(folder)
    of_class = trace.table("kernel_classes").to_pylist()
    for row in of_class:
        row["counters"] = {}
    table = trace.table("counters").to_pandas()
    for row in table[table.kernel_id < 0].itertuples():
        of_class[row.class_id]["counters"][row.metric] = (row.value, row.low, row.high)
    return of_class


def same(row: dict[str, object], key: tuple[str, str, str]) -> bool:
    """Whether ncu's kernel is of this class: same grid and block, and the same function name."""
    shape = [tuple(int(row[f"{what}_{axis}"]) for axis in "xyz") for what in ("grid", "block")]
    theirs = [tuple(int(n) for n in text.strip("()").split(",")) for text in key[1:]]
    function = key[0].split("<")[0].split("(")[0].split("::")[-1].split(" ")[-1]
    return shape == theirs and function in str(row["name"])


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
        ours = classes(folder)
    theirs, seconds, kernels = replayed(arguments.ncu.split(), [*program, "--steps", "1"], arguments.launches)
    print(f"ncu: {seconds:.1f} s for {kernels} kernels, {seconds / max(kernels, 1) * 1e3:.0f} ms each")
    if arguments.parts == "decode" and not arguments.launches:
        steps = DECODE_STEPS * arguments.repeat
        print(
            f"a decode step: {sampled_seconds / steps * 1e3:.2f} ms sampled, start and analysis of {steps} included, "
            f"{seconds:.1f} s replayed: {seconds * steps / sampled_seconds:.0f} times as long"
        )
    inside: dict[str, list[bool]] = defaultdict(list)
    print(f"{'us':>7} {'launches':>8} {'metric':20} {'ours':>14} {'low':>14} {'high':>14} {'ncu':>14} {'ratio':>7}")
    for key, values in theirs.items():
        found = [row for row in ours if same(row, key)]
        if len(found) != 1:
            continue
        (row,) = found
        mean_us = row["total_ns"] / max(row["launches_count"], 1) / 1e3
        in_l2 = values["dram__bytes_read.sum"] < _DRAM_SHARE_MIN * 32 * values["lts__t_sectors.sum"]
        for metric, theirs_name in METRICS.items():
            if metric not in row["counters"] or (in_l2 and metric.startswith("dram")):
                continue
            value, low, high = row["counters"][metric]
            truth = values[theirs_name]
            kind = "20 us and more" if mean_us >= 20 else "3 to 20 us" if mean_us >= 3 else "below 3 us"
            inside[f"{metric}, {kind}"].append(low <= truth <= high)
            ratio = value / truth if truth else np.nan
            numbers = f"{value:14.0f} {low:14.0f} {high:14.0f} {truth:14.0f} {ratio:7.3f}"
            print(f"{mean_us:7.1f} {row['launches_count']:8} {metric:20} {numbers}")
        if {"l2_sectors_count", "l2_hit_sectors_count"} <= row["counters"].keys():
            hits, lookups = (row["counters"][name][0] for name in ("l2_hit_sectors_count", "l2_sectors_count"))
            numbers = f"{100 * hits / lookups:13.1f}% {'':29} {values[HIT_RATE]:13.1f}%"
            print(f"{mean_us:7.1f} {row['launches_count']:8} {'L2 hit rate':20} {numbers}")
    for what, hits in inside.items():
        print(f"{what}: {sum(hits)} of {len(hits)} inside the bounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
