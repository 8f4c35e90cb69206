from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
import tiny
from scanned import scan

from spikeprof.analyzers.base import Info, Result
from spikeprof.profiler.errors import DamagedTrace
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote, Trace
from spikeprof.reports import build
from spikeprof.reports.build import build_report
from spikeprof.reports.html import render_html
from spikeprof.reports.model import rows
from spikeprof.reports.sentences import facts, missing, notice
from spikeprof.reports.truth_line import truth_line


@dataclass(frozen=True)
class Broken:
    info: ClassVar[Info] = Info("broken", "Does it break?", needs=())

    def analyze(self, trace: Trace) -> Result:
        raise ZeroDivisionError("division by zero")


def kernel(start: int, end: int, **more: object) -> dict[str, object]:
    return {"start_ns": start, "end_ns": end, **more}


def test_a_fault_of_an_analyzer_becomes_part_of_the_report() -> None:
    report = build_report(tiny.trace(), "t", [Broken()])
    assert [(r.analyzer, r.status) for r in report.results] == [("broken", "error")]
    assert "division by zero" in report.results[0].reason


def test_the_registry_is_asked_truth_first() -> None:
    report = build_report(tiny.trace(kernels=[kernel(0, 10)], memory_ops=[]), "t")
    assert report.results[0].analyzer == "truth"
    assert report.trace_name == "t"
    assert report.result("nobody") is None


def test_devices_and_processes_count_their_work() -> None:
    report = build_report(
        tiny.trace(
            kernels=[kernel(0, 10, rank=0, device=0), kernel(5, 9, rank=1, device=2), kernel(6, 7, rank=1, device=2)],
            memory_ops=[kernel(20, 30, rank=1, device=2)],
            processes=[{"rank": 0, "pid": 10}, {"rank": 1, "pid": 11}, {"rank": 2, "pid": 12}],
            devices=[
                {"rank": 0, "device": 0, "name": "H200"},
                {"rank": 1, "device": 0, "name": "H200"},
                {"rank": 1, "device": 1, "name": "H200"},
            ],
        ),
        "t",
        [],
    )
    devices = rows(report.tables["devices"])
    assert [(d["device"], d["name"], d["ranks"]) for d in devices] == [
        (0, "H200", "0, 1"),
        (1, "H200", "1"),
        (2, None, ""),
    ]
    assert report.tables["devices"]["kernels_count"] == [1, 0, 2]
    assert report.tables["devices"]["memory_ops_count"] == [0, 0, 1]
    assert report.tables["processes"]["kernels_count"] == [1, 2, 0]


def test_without_their_tables_devices_and_processes_come_from_the_work() -> None:
    report = build_report(tiny.trace(kernels=[kernel(0, 10, rank=3, device=1)]), "t", [])
    assert report.tables["devices"] == {"device": [1], "kernels_count": [1], "memory_ops_count": [None]}
    assert report.tables["processes"] == {"rank": [3], "kernels_count": [1], "memory_ops_count": [None]}
    assert "samples" not in report.tables
    assert "windows" not in report.tables


def test_windows_are_those_not_recorded_longest_first() -> None:
    windows = [
        {"state": "traced", "start_ns": 0, "end_ns": 90},
        {"state": "clean", "start_ns": 90, "end_ns": 95},
        {"state": "yielded", "start_ns": 95, "end_ns": 200, "reason": "torch.profiler"},
    ]
    table = build_report(tiny.trace(windows=windows), "t", []).tables["windows"]
    assert table["state"] == ["yielded", "clean"]
    assert table["start_ns"] == [95, 90]


def test_few_samples_stay_as_they_are() -> None:
    samples = [
        {"t_ns": 0, "metric": "power_w", "value": 100.0},
        {"t_ns": 5, "metric": "power_w", "value": float("nan")},
        {"t_ns": 10, "metric": "power_w", "value": 300.0},
        {"t_ns": 10, "metric": "sm_clock_mhz", "value": 1980.0, "device": 1},
    ]
    assert build_report(tiny.trace(samples=samples), "t", []).tables["samples"] == {
        "device": [0, 0, 1],
        "metric": ["power_w", "power_w", "sm_clock_mhz"],
        "t_ns": [0, 10, 10],
        "value": [100.0, 300.0, 1980.0],
    }


def test_many_samples_become_means_of_equal_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MAX_SAMPLE_POINTS", 2)
    # [0, 3] and [4, 7]: values 0 1 2 3 and 4 5 6 7, taken at their own times
    samples = [{"t_ns": t, "metric": "power_w", "value": float(t)} for t in range(8)]
    table = build_report(tiny.trace(samples=samples), "t", []).tables["samples"]
    assert table["value"] == [1.5, 5.5]
    assert table["t_ns"] == [1, 5]


def test_stretches_without_a_sample_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MAX_SAMPLE_POINTS", 4)
    times = np.array([0, 1, 2, 3, 100], np.int64)  # stretches of 25.25 ns: all but the last in the first one
    assert build._binned(times, times.astype(float)) == ([1, 100], [1.5, 100.0])


def test_the_inventory_names_what_is_damaged() -> None:
    trace = Trace(tiny.trace().manifest, {}, {"kernels": "kernels.parquet is damaged: no footer"})
    inventory = {r["table"]: (r["state"], r["reason"]) for r in rows(build_report(trace, "t", []).tables["inventory"])}
    assert inventory["kernels"] == ("damaged", "kernels.parquet is damaged: no footer")
    assert inventory["ops"] == ("absent", "")


def test_damage_that_shows_on_reading_is_named_like_any_other() -> None:
    def broken() -> Any:
        raise DamagedTrace("steps.parquet is damaged: page 0")

    whole = tiny.trace(kernels=[{"start_ns": 0, "end_ns": 5}])
    report = build_report(Trace(whole.manifest, {**whole.tables, "steps": broken}), "t")
    inventory = {r["table"]: (r["state"], r["reason"]) for r in rows(report.tables["inventory"])}
    assert inventory["steps"] == ("damaged", "steps.parquet is damaged: page 0")
    assert inventory["kernels"] == ("collected", "")
    assert not [r for r in report.results if r.status == "error"]


def test_findings_come_gravest_first() -> None:
    from reports import fabricated

    assert [f.rule for f in fabricated.rich().findings()] == ["launch-bound", "long-tail", "records-set-aside"]


def test_every_class_of_idle_time_has_a_name_and_a_meaning() -> None:
    from spikeprof.analyzers.derived import CLASSES
    from spikeprof.reports.titles import IDLE_CLASSES

    assert set(IDLE_CLASSES) == set(CLASSES)


def test_a_gauge_that_never_changes_is_its_first_and_last_reading() -> None:
    samples = [{"t_ns": t, "metric": "mem_clock_mhz", "value": 2619.0} for t in (0, 5, 9)]
    table = build_report(tiny.trace(samples=samples), "t", []).tables["samples"]
    assert table["t_ns"] == [0, 9]


def test_energy_is_the_rise_of_a_counter() -> None:
    samples = [
        {"device": d, "t_ns": t, "metric": "energy_j", "value": v}
        for d, t, v in ((0, 0, 1000.0), (1, 0, 5.0), (0, 9, 1250.5), (1, 9, 5.0))
    ]
    trace = tiny.trace(devices=[{"device": 0}, {"device": 1}, {"device": 2}], samples=samples)
    report = build_report(trace, "t", [])
    assert report.tables["devices"]["energy_j"] == [250.5, 0.0, None]
    assert report.tables["samples"]["value"] == []


def test_energy_of_readings_that_failed_is_left_out() -> None:
    values = [(0, 5.0), (0, float("nan")), (0, 7.5), (1, float("nan")), (2, float("inf")), (2, 1.0)]
    samples = [{"device": d, "t_ns": i, "metric": "energy_j", "value": v} for i, (d, v) in enumerate(values)]
    devices = [{"device": d} for d in range(3)]
    table = build_report(tiny.trace(devices=devices, samples=samples), "t").tables["devices"]
    assert table["energy_j"] == [2.5, None, 0.0]


@pytest.mark.parametrize(
    ("table", "column", "value", "why"),
    [
        ("kernels", "end_ns", 2**62, "cannot be on the session's clock"),
        ("kernels", "device", None, "have no value in the column 'device'"),
        ("windows", "start_ns", -(2**63), "cannot be on the session's clock"),
        ("windows", "state", None, "have no value in the column 'state'"),
        ("processes", "command", None, "have no value in the column 'command'"),
        ("samples", "device", None, "have no value in the column 'device'"),
    ],
)
def test_a_table_that_cannot_be_true_is_damaged_and_the_rest_is_read(
    table: str, column: str, value: int | None, why: str
) -> None:
    whole = {name: [{}] for name in ("memory_ops", "runtime_calls", "windows", "processes", "samples")}
    kernels = [{"start_ns": 0, "end_ns": 5}, {"start_ns": 7, "end_ns": 9}]
    trace = tiny.trace(**{**whole, "kernels": kernels})
    spec = TABLES[table].arrow.field(column)
    rows = trace.table(table).to_pylist()
    rows[0][column] = value
    broken = pa.table({f.name: tiny.table_column([r[f.name] for r in rows], f.type) for f in TABLES[table].arrow})
    assert broken.schema.field(column).type == spec.type
    report = build_report(dataclasses.replace(trace, tables={**trace.tables, table: broken}), "t")
    assert "error" not in {r.status for r in report.results}
    damaged = report.results[0].tables["damaged_tables"]
    assert damaged["table"] == [table]
    assert why in damaged["reason"][0]


REFUSED = {"activity": CollectorNote("refused", "no process used CUDA"), "numerics": CollectorNote("ok")}


def test_what_was_asked_for_and_refused_says_why_and_not_to_ask_again() -> None:
    report = build_report(tiny.trace(collectors=REFUSED), "t")
    gaps, caches = report.result("launch-gaps"), report.result("cache-miss")
    assert gaps is not None
    assert caches is not None
    assert (gaps.status, gaps.reason, gaps.collect_with) == ("not_measured", "no process used CUDA", "spikeprof doctor")
    assert "'counters' was not collected" in caches.reason, "nobody asked for counters"
    assert caches.collect_with == "spikeprof run --counters -- CMD"
    assert "no process used CUDA. Ask spikeprof doctor what can be recorded here." in notice(gaps)


def test_a_recording_of_numerics_alone_is_trusted_for_its_scans() -> None:
    lost = REFUSED | {"numerics": CollectorNote("degraded", dropped_count=3)}
    for collectors, said, state in ((REFUSED, "2 scans of tensors; none lost", "value"),
                                    (lost, "2 scans of tensors; 3 lost", "problem")):  # fmt: skip
        scans = [scan(0, 0, "layers.0"), scan(1, 0, "layers.0")]
        items = truth_line(build_report(tiny.trace(collectors=collectors, tensor_stats=scans), "t"))
        assert [(i.label, i.text, i.state) for i in items] == [
            ("GPU work", "not measured: no process used CUDA", "not_measured"),
            ("Numerics", said, state),
        ]


def test_the_page_of_a_recording_of_numerics_alone_begins_with_them() -> None:
    trace = tiny.trace(collectors=REFUSED, tensor_stats=[scan(0, 0, "layers.0"), scan(1, 0, "layers.0")])
    page = render_html(build_report(trace, "t"))
    places = [page.index(f'<section id="{name}">') for name in ("findings", "numerics", "missing", "kernels", "about")]
    assert places == sorted(places)
    page = render_html(build_report(tiny.trace(kernels=[kernel(0, 10)], tensor_stats=[scan(0, 0, "layers.0")]), "t"))
    assert page.index('<section id="kernels">') < page.index('<section id="numerics">')


def test_what_has_one_reason_and_one_remedy_is_one_item() -> None:
    items = missing(build_report(tiny.trace(collectors=REFUSED), "t"))
    (unrecorded,) = [item for item in items if item.why == "no process used CUDA" and not item.in_truth_line]
    assert unrecorded.what.startswith("Steps, kernel latency, time by module")
    assert unrecorded.what.endswith("collector activity (refused)")
    assert len({(item.why, item.how, item.in_truth_line) for item in items}) == len(items)


def test_options_read_as_words() -> None:
    options = {"max_bytes": "2147483648", "graph_nodes": "True", "numerics_roles": "['output', 'input']", "window": "1"}
    trace = tiny.trace()
    trace = dataclasses.replace(trace, manifest=dataclasses.replace(trace.manifest, options=options))
    shown = dict(facts(build_report(trace, "t", [])))
    assert {name: shown[f"Option {name}"] for name in ("max bytes", "graph nodes", "numerics roles", "window")} == {
        "max bytes": "2.00 GiB",
        "graph nodes": "yes",
        "numerics roles": "output, input",
        "window": "1",
    }
