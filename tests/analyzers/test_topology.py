from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import tiny

from spikeprof.analyzers.base import Finding, Result
from spikeprof.analyzers.derived.link_use import link_uses
from spikeprof.analyzers.derived.links import Links
from spikeprof.analyzers.runner import run_one
from spikeprof.analyzers.topology import Topology
from spikeprof.profiler.importers import open_trace

ROOT = Path(__file__).parents[2]
GB = 1e9
US = 1_000

Row = dict[str, Any]


def link(a: int, b: int, **values: Any) -> Row:
    given = {"measured_bytes_per_s": None, "peer_access": "ok", "max_links_count": None, "numa_node": -1, **values}
    return {"src_device": a, "dst_device": b, **given}


def joined(
    gpus: int, kind: str = "nvswitch", links: int = 18, gb_per_s: float | None = 450, **values: Any
) -> list[Row]:
    peak = None if gb_per_s is None else gb_per_s * GB
    same = {"kind": kind, "links_count": links, "peak_bytes_per_s": peak, **values}
    return [link(a, b, **same) for a, b in permutations(range(gpus), 2)]


def hosts(gpus: int, **values: Any) -> list[Row]:
    same = {
        "kind": "pcie",
        "generation": 5,
        "max_generation": 5,
        "links_count": 16,
        "max_links_count": 16,
        "peak_bytes_per_s": 64 * GB,
        "peer_access": "",
        **values,
    }
    return [link(a, b, **same) for gpu in range(gpus) for a, b in ((gpu, -1), (-1, gpu))]


def asked(topology: list[Row], options: dict[str, Any] | None = None, **tables: Any) -> Result:
    result = run_one(tiny.trace(topology=topology, **tables), Topology(**(options or {})))
    assert result.status in ("ok", "findings", "not_applicable"), result.reason
    return result


def found(result: Result, rule: str) -> list[Finding]:
    return [f for f in result.findings if f.rule == rule]


def values(finding: Finding) -> dict[str, float]:
    return {e.metric: e.value for e in finding.evidence}


# -- what it suits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        # fabric, GPUs, both ways, levels, GPUs of a group
        (joined(8), ("nvswitch", "0, 1, 2, 3, 4, 5, 6, 7", 900 * GB, 3, 8)),  # 18 NVLink 4
        (joined(2), ("nvswitch", "0, 1", 900 * GB, 3, 2)),  # three levels suit, two GPUs fill one
        (joined(6), ("nvswitch", "0, 1, 2, 3, 4, 5", 900 * GB, 3, 4)),
        (joined(8, links=12, gb_per_s=300), ("nvswitch", "0, 1, 2, 3, 4, 5, 6, 7", 600 * GB, 2, 4)),  # 12 NVLink 3
        (joined(2, "nvlink", 4, 56.25), ("nvlink", "0, 1", 112.5 * GB, 1, 2)),
        (joined(3, "nvlink", 6, 150), ("nvlink", "0, 1, 2", 600 * GB, 2, 2)),  # to each of two peers 150
        (joined(2, gb_per_s=None), ("nvswitch", "0, 1", None, 1, 2)),
        (joined(4, "pcie", 16, 64), ("pcie", "0, 1", None, 1, 2)),
        (joined(4, "pcie", 16, 64, peer_access="not supported"), ("none", "", None, 0, 1)),
        (joined(4, "pcie", 16, 64, peer_access=""), ("unknown", "", None, None, None)),
    ],
)
def test_levels_follow_from_what_the_nvlinks_of_a_gpu_carry_both_ways(topology: list[Row], expected: Any) -> None:
    result = asked(topology)
    row = {name: column[0] for name, column in result.tables["hierarchy"].items()}
    assert tuple(row.values()) == (*expected, 600 * GB, 900 * GB)
    assert result.metric("tensor_parallel_levels_count") == expected[3]
    assert result.metric("tensor_parallel_gpus_count") == expected[4]


def test_the_poorest_gpu_of_the_group_decides() -> None:
    rows = joined(4)
    for row in rows:
        if 3 in (row["src_device"], row["dst_device"]):
            row.update(links_count=17, peak_bytes_per_s=425 * GB)
    # GPUs 0 to 2 reach each other by 18 links, GPU 3 has 17: 850 GB/s both ways.
    assert asked(rows).tables["hierarchy"]["levels_count"] == [2]


def test_one_gpu_suits_nothing_and_that_is_no_gap() -> None:
    result = asked(hosts(1))
    assert result.status == "ok"
    assert result.metric("gpus_count") == 1
    assert result.metric("tensor_parallel_levels_count") is None
    assert result.tables["hierarchy"]["levels_count"] == []


def test_of_a_mesh_the_group_holds_only_gpus_that_are_joined_each_to_each() -> None:
    # 0-1, 1-2, 2-3, 3-0 and 0-2: two triangles over the diagonal.
    edges = {(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)}
    rows = [row for row in joined(4, "nvlink", 1, 25) if tuple(sorted((row["src_device"], row["dst_device"]))) in edges]
    assert Links(tuple(rows)).nvlink_group == [0, 1, 2]
    assert Links(tuple(rows)).nvlinks(0) == (3, 75 * GB)


def test_without_gpus_it_does_not_apply() -> None:
    assert asked([]).status == "not_applicable"


# -- rules -------------------------------------------------------------------------------------------------------------


def test_a_sound_machine_has_no_findings() -> None:
    rows = joined(2, measured_bytes_per_s=391 * GB) + hosts(2, measured_bytes_per_s=55 * GB, numa_node=0)
    assert asked(rows).findings == ()


def test_slow_links_are_told_worst_first_with_how_many_there_are() -> None:
    rows = joined(2, measured_bytes_per_s=200 * GB) + hosts(2, measured_bytes_per_s=32 * GB)
    rows[1]["measured_bytes_per_s"] = 90 * GB  # 0.2 of 450
    slow = found(asked(rows, {"max_findings_count": 2}), "slow-link")
    assert [f.scope for f in slow] == [{"src_device": 1, "dst_device": 0}, {"src_device": 0, "dst_device": 1}]
    assert values(slow[0])["measured_share"] == 0.2
    assert values(slow[0])["slow_links_count"] == 6
    hosted = found(asked(hosts(1, measured_bytes_per_s=32 * GB)), "slow-link")
    assert [f.scope for f in hosted] == [{"device": 0, "to": "host"}, {"device": 0, "from": "host"}]


def test_exactly_the_least_share_is_not_slow() -> None:
    assert not found(asked(hosts(1, measured_bytes_per_s=0.6 * 64 * GB)), "slow-link")


def test_pairs_without_access_are_counted_and_not_called_slow() -> None:
    rows = joined(3, "pcie", 16, 64, measured_bytes_per_s=10 * GB)
    for row in rows[:2]:
        row["peer_access"] = "the chipset does not support it"
    (finding,) = found(asked(rows), "no-peer-access")
    assert finding.scope == {"reason": "the chipset does not support it"}
    assert values(finding) == {"pairs_without_access_count": 2, "pairs_count": 6}
    assert finding.recommendation.startswith("Keep ranks")
    assert len(found(asked(rows, {"max_findings_count": 9}), "slow-link")) == 4
    none = found(asked(joined(2, "pcie", 16, 64, peer_access="not supported")), "no-peer-access")
    assert none[0].recommendation.startswith("Prefer pipeline")


@pytest.mark.parametrize(
    ("state", "severity", "evidence"),
    [
        ({"links_count": 8}, "warning", {"pcie_lanes_count": 8}),
        ({"generation": 1}, "info", {"pcie_generation_id": 1}),
        ({"generation": 1, "measured_bytes_per_s": 60 * GB}, "", {}),  # it woke up
        (
            {"generation": 3, "measured_bytes_per_s": 16 * GB},
            "warning",
            {"pcie_generation_id": 3, "measured_share": 0.25},
        ),
        ({"generation": 0, "max_generation": 0, "links_count": None}, "", {}),  # not known: not judged
    ],
)
def test_pcie_below_its_maximum(state: dict[str, Any], severity: str, evidence: dict[str, float]) -> None:
    below = found(asked(hosts(1, **state)), "pcie-below-maximum")
    assert [f.severity for f in below] == ([severity] if severity else [])
    assert [values(f) for f in below] == ([evidence] if severity else [])


def test_links_that_are_down_are_told_for_their_gpu() -> None:
    rows = joined(3, links=16, max_links_count=16)
    for row in rows:
        if row["src_device"] == 1:
            row["max_links_count"] = 18
    (finding,) = found(asked(rows), "nvlinks-down")
    assert (finding.scope, values(finding)) == ({"device": 1}, {"nvlinks_down_count": 2, "nvlinks_count": 16})


def test_numa_nodes_are_counted_where_they_are_known() -> None:
    rows = hosts(3)
    for row, node in zip(rows, (0, 0, 1, 1, -1, -1), strict=True):
        row["numa_node"] = node
    (finding,) = found(asked(rows), "split-numa")
    assert values(finding) == {"numa_nodes_count": 2}
    assert not found(asked(hosts(2, numa_node=-1)), "split-numa")


# -- link use ----------------------------------------------------------------------------------------------------------


def counted(device: int, metric: str, *numbers: float, length: int = 10 * US) -> list[Row]:
    """One sample of ``length`` ns after another."""
    return [
        {"device": device, "start_ns": i * length, "end_ns": (i + 1) * length, "metric": metric, "value": v}
        for i, v in enumerate(numbers)
    ]


def test_bytes_over_time_are_rates_against_the_link_s_own() -> None:
    # 450 GB/s are 4.5 MB in 10 us: full, full, nothing, nothing, half, half, nothing, nothing.
    samples = counted(0, "nvlink_sent_bytes", 4.5e6, 4.5e6, 0, 0, 2.25e6, 2.25e6, 0, 0)
    result = asked(joined(2) + hosts(2), {"bins_count": 4}, counter_samples=samples)
    over_time = result.tables["use_over_time"]
    assert over_time["bin_start_ns"] == [0, 20 * US, 40 * US, 60 * US]
    assert over_time["link_share"] == pytest.approx([1, 0, 0.5, 0])
    assert over_time["bytes_per_s"] == pytest.approx([450 * GB, 0, 225 * GB, 0])
    use = {name: column[0] for name, column in result.tables["use"].items()}
    assert use == {
        "device": 0,
        "link": "nvlink_sent_bytes",
        "sampled_by": "PM sampling",
        "total_bytes": 13.5e6,
        "mean_bytes_per_s": pytest.approx(168.75 * GB),
        "busiest_bytes_per_s": pytest.approx(450 * GB),
        "peak_bytes_per_s": 450 * GB,
        "mean_share": pytest.approx(0.375),
        "busiest_share": pytest.approx(1.0),
        "saturated_time_share": 0.25,  # 2 of 8 samples above 0.75
    }
    assert result.metric("nvlink_sent_mean_share") == pytest.approx(0.375)
    (finding,) = found(result, "link-saturated")
    assert finding.scope == {"device": 0, "link": "nvlink_sent"}
    assert values(finding)["saturated_time_share"] == 0.25


def shifted(rows: list[Row], by_ns: int) -> list[Row]:
    return [dict(row, start_ns=row["start_ns"] + by_ns, end_ns=row["end_ns"] + by_ns) for row in rows]


def test_the_busiest_gpu_is_shown() -> None:
    # 64 GB/s are 640 kB in 10 us. In bins of 20 us GPU 0 reads 10 %, then nothing, GPU 1 nothing, then 25 %.
    samples = counted(0, "pcie_read_bytes", 64e3, 64e3, 0, 0) + counted(1, "pcie_read_bytes", 0, 0, 160e3, 160e3)
    over_time = asked(hosts(2), counter_samples=samples).tables["use_over_time"]
    assert over_time["bin_start_ns"] == [0, 20 * US]
    assert over_time["link_share"] == pytest.approx([0.1, 0.25])


def test_a_sample_counts_in_the_bin_of_its_middle_and_bins_without_one_have_no_value() -> None:
    first = counted(0, "pcie_read_bytes", 64e3, 64e3, 0, 0)
    samples = [*first, *shifted(first, 80 * US)]
    over_time = asked(hosts(1), {"bins_count": 6}, counter_samples=samples).tables["use_over_time"]
    assert over_time["bin_start_ns"] == [0, 30 * US, 60 * US, 90 * US]  # eight samples: four bins
    # Bins: samples 0 1 2, sample 3, sample 4 (80 to 90 us), samples 5 6 7.
    assert over_time["link_share"] == pytest.approx([0.2 / 3, 0, 0.1, 0.1 / 3])
    samples = [*first, *shifted(first, 200 * US)]
    hole = asked(hosts(1), {"bins_count": 3}, counter_samples=samples).tables["use_over_time"]
    assert hole["link_share"] == [pytest.approx(0.05), None, pytest.approx(0.05)]


def test_what_cannot_be_true_is_left_out() -> None:
    samples = [
        *counted(0, "pcie_written_bytes", 640e3, float("nan"), -5.0, 640e3),
        {"device": 0, "start_ns": 50 * US, "end_ns": 50 * US, "metric": "pcie_written_bytes", "value": 9e9},
        {"device": 0, "start_ns": -5_000 * US, "end_ns": 0, "metric": "pcie_written_bytes", "value": 9e9},
    ]
    use = asked(hosts(1), counter_samples=samples).tables["use"]
    assert (use["total_bytes"], use["mean_share"]) == ([1280e3], [pytest.approx(1.0)])


def gauge(metric: str, *numbers: float, device: int = 0) -> list[Row]:
    """One reading every 100 ms."""
    return [{"device": device, "t_ns": i * 100_000_000, "metric": metric, "value": v} for i, v in enumerate(numbers)]


def test_gauges_stand_in_for_counters_and_totals_for_rates() -> None:
    samples = [
        *gauge("gpm_pcie_read_bytes_per_s", 1 * GB, 2 * GB, 4 * GB),
        *gauge("pcie_read_bytes_per_s", 9 * GB, 9 * GB, 9 * GB),
        *gauge("nvlink_sent_total_bytes", 5e9, 6e9, 1e9, 3e9),  # set back in between
        *gauge("pcie_written_bytes_per_s", 1 * GB, 3 * GB),
    ]
    trace = tiny.trace(samples=sorted(samples, key=lambda row: row["t_ns"]))
    uses = {use.link: (use.sampled_by, use.n_bytes.tolist()) for use in link_uses(trace)}
    assert uses == {
        "pcie_read": ("GPM", [0.2e9, 0.4e9]),
        "nvlink_sent": ("NVML", [1e9, 2e9]),
        "pcie_written": ("NVML", [0.3e9]),
    }
    counted_too = tiny.trace(samples=samples[:3], counter_samples=counted(0, "pcie_read_bytes", 7.0))
    assert [(u.sampled_by, u.n_bytes.tolist()) for u in link_uses(counted_too)] == [("PM sampling", [7.0])]


def test_bytes_that_were_not_sampled_name_the_flag() -> None:
    result = asked(joined(2) + hosts(2))
    missing = {m.name: m.reason for m in result.metrics if m.value is None}
    assert missing == dict.fromkeys(
        ("nvlink_sent_mean_share", "nvlink_received_mean_share", "pcie_read_mean_share", "pcie_written_mean_share"),
        "bytes over this link were not sampled",
    )
    assert result.collect_with == "spikeprof run --counters=nvlink -- CMD"
    alone = asked(hosts(1), counter_samples=counted(0, "pcie_read_bytes", 1.0) + counted(0, "pcie_written_bytes", 1.0))
    assert [m for m in alone.metrics if m.value is None] == []  # no NVLink: nothing is missing
    assert alone.collect_with == ""


def test_a_link_of_unknown_rate_keeps_its_bytes() -> None:
    result = asked(hosts(1, peak_bytes_per_s=None), counter_samples=counted(0, "pcie_read_bytes", 640e3))
    use = {name: column[0] for name, column in result.tables["use"].items()}
    assert (use["mean_bytes_per_s"], use["mean_share"], use["saturated_time_share"]) == (64 * GB, None, None)
    assert {m.name: m.reason for m in result.metrics}["pcie_read_mean_share"] == "the rate of the link is not known"


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_bytes_per_launch_of_kernel_classes_against_the_link() -> None:
    classes = [
        {"name": "all_reduce", "device": 0, "launches_count": 10, "total_ns": 1_000 * US},  # 100 us each
        {"name": "copy", "device": 1, "launches_count": 2, "total_ns": 20 * US},
        {"name": "gemm", "device": 0, "launches_count": 50, "total_ns": 500 * US},
    ]
    sent = {"metric": "nvlink_sent_bytes"}
    counters = [
        {"kernel_id": -1, "class_id": 0, **sent, "value": 9e6, "low": 8e6, "high": 10e6, "match": "class"},
        {"kernel_id": 4, "class_id": 0, **sent, "value": 1e6, "low": 1e6, "high": 1e6},  # the class's own counts
        {"kernel_id": 5, "class_id": 1, **sent, "value": 1e6, "low": 1e6, "high": 2e6},
        {"kernel_id": 6, "class_id": 1, **sent, "value": 3e6, "low": 2e6, "high": 4e6},
        {"kernel_id": 7, "class_id": 2, **sent, "value": 0.0, "low": 0.0, "high": 0.0},
        {"kernel_id": 8, "class_id": 2, **sent, "value": float("nan"), "match": "none"},
        {"kernel_id": 9, "class_id": 2, "metric": "dram_read_bytes", "value": 5e6},
        {"kernel_id": -1, "class_id": 0, "metric": "pcie_read_bytes", "value": 3.2e5, "low": 0.0, "high": 6e5},
    ]
    table = asked(joined(2) + hosts(2), kernel_classes=classes, counters=counters).tables["kernel_links"]
    assert table["kernel"] == ["all_reduce", "copy", "all_reduce"]
    assert table["link"] == ["nvlink_sent_bytes", "nvlink_sent_bytes", "pcie_read_bytes"]
    assert table["launch_bytes"] == [9e6, 2e6, 3.2e5]
    assert (table["low_bytes"], table["high_bytes"]) == ([8e6, 1.5e6, 0.0], [10e6, 3e6, 6e5])
    # 9 MB in 100 us are 90 GB/s of 450; 2 MB in 10 us are 200; 320 kB in 100 us are 3.2 of 64.
    assert table["link_share"] == pytest.approx([0.2, 200 / 450, 0.05])


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_rate_that_is_none_is_unknown(rate: float) -> None:
    rows = joined(2) + hosts(2)
    for row in rows:
        row.update(peak_bytes_per_s=rate, measured_bytes_per_s=rate)
    result = asked(rows)
    assert result.tables["hierarchy"]["both_ways_bytes_per_s"] == [None]
    assert result.tables["links"]["measured_bytes_per_s"] == [None] * len(rows)
    assert [f.rule for f in result.findings] == []


def test_a_part_of_a_recording_has_its_own_launches() -> None:
    kernels = [{"name": "all_reduce", "start_ns": t, "end_ns": t + 100_000} for t in (0, 200_000, 400_000)]
    classes = [{"name": "all_reduce", "launches_count": 3, "total_ns": 300_000}]
    counters = [{"kernel_id": -1, "class_id": 0, "metric": "nvlink_sent_bytes", "value": 9e6, "low": 8e6, "high": 1e7}]
    rows = joined(2) + hosts(2)
    whole = tiny.trace(topology=rows, kernels=kernels, kernel_classes=classes, counters=counters)
    table = run_one(whole.narrowed(150_000, 900_000), Topology()).tables["kernel_links"]
    assert (table["launches_count"], table["mean_ns"], table["launch_bytes"]) == ([2], [100_000], [9e6])


def test_the_sample_of_two_gpus() -> None:
    """18 NVLinks of 25 GB/s through switches; an all-reduce of 16 MiB over two ranks sends 16 MiB from each."""
    result = run_one(open_trace(ROOT / "sample_traces" / "h200_two_gpus"), Topology())
    links = result.tables["links"]
    joined_pair = [row for row, kind in enumerate(links["kind"]) if kind == "nvswitch"]
    assert [links["links_count"][row] for row in joined_pair] == [18, 18]
    assert [links["peak_bytes_per_s"][row] for row in joined_pair] == [450 * GB, 450 * GB]
    kernels = result.tables["kernel_links"]
    sent = [
        row
        for row, (name, link) in enumerate(zip(kernels["kernel"], kernels["link"], strict=True))
        if "AllReduce_Sum_f16" in name and link == "nvlink_sent_bytes"
    ]
    assert [kernels["device"][row] for row in sent] == [0, 1]
    assert [kernels["launch_bytes"][row] for row in sent] == pytest.approx([2**24, 2**24], rel=2e-3)


# -- the tables that people see ----------------------------------------------------------------------------------------


def test_one_row_per_gpu_with_both_measured_ways_to_the_host() -> None:
    rows = joined(2) + hosts(2, numa_node=-1)
    rows[2].update(measured_bytes_per_s=40 * GB, numa_node=1)  # GPU 0 to the host
    rows[3]["measured_bytes_per_s"] = 50 * GB
    gpus = asked(rows).tables["gpus"]
    assert {name: column[0] for name, column in gpus.items()} == {
        "device": 0,
        "numa_node": 1,
        "nvlinks_count": 18,
        "nvlink_bytes_per_s": 450 * GB,
        "pcie_generation_id": 5,
        "pcie_lanes_count": 16,
        "pcie_bytes_per_s": 64 * GB,
        "from_host_bytes_per_s": 50 * GB,
        "to_host_bytes_per_s": 40 * GB,
    }
    assert gpus["numa_node"][1] is None
