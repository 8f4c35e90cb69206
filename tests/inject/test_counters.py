"""Counters of the kernels of a real process: activity from one made libcupti, samples from another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from inject.harness import Lab

from spikeprof.profiler.counter_metrics import SETS

pytestmark = pytest.mark.timeout(60)


def test_samples_are_attributed_to_the_kernels_of_the_run(
    lab: Lab, pm_libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(pm_libraries))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(pm_libraries / "nvidia" / "cu13" / "lib"))
    # The sampler stands still once, after 0.22 s, to learn how long decoding takes; and at 0.1 ms a sample, a busy
    # machine must keep it from running for 80 ms before samples are lost.
    run = lab.record(
        "import cupy, time\ntime.sleep(0.6)\nfor _ in range(50):\n    cupy.launch(20)\n    time.sleep(0.005)",
        counters=SETS["memory"],
        counters_interval_ns=100_000,
    )
    assert run.code == 0
    assert run.kernels == 1000
    trace = run.trace
    note = trace.manifest.collectors["pm_sampling"]
    assert note.state == "ok", note
    assert int(re.search(r"sampled (\d+) % of the time", note.reason)[1]) > 70
    samples, balance = (trace.table(name).to_pandas() for name in ("counter_samples", "counter_balance"))
    for metric in ("dram_read_bytes", "l2_sectors_count"):
        placed = balance[balance.metric == metric].value.sum()
        assert placed == pytest.approx(samples[samples.metric == metric].value.sum(), rel=1e-9)
    classes = trace.table("kernel_classes").to_pandas()
    assert sorted(classes.launches_count) == [300, 350, 350]
    counters = trace.table("counters").to_pandas()
    assert set(counters.class_id) == set(classes.class_id)
    assert set(counters.metric) == set(SETS["memory"])
    assert (counters.low <= counters.value).all()
    assert (counters.value <= counters.high).all()
