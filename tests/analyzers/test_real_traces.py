"""Analyzers on traces that other people recorded, against values worked out independently (see that folder)."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from paths import SHARED, needs_shared

from spikeprof.analyzers.base import Result
from spikeprof.analyzers.registry import ANALYZERS
from spikeprof.analyzers.runner import run_analyzers
from spikeprof.profiler.importers import open_trace

pytestmark = needs_shared
TRACES = SHARED / "traces"
ORACLE = TRACES / "busy_oracle.tsv"


def files() -> list[dict[str, str]]:
    if not ORACLE.is_file():
        return []
    with ORACLE.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


def analysed(path: Path) -> dict[str, Result]:
    return {result.analyzer: result for result in run_analyzers(open_trace(path), ANALYZERS)}


@pytest.mark.parametrize("row", files(), ids=lambda row: row["file"][-60:])
def test_busy_and_idle_time_are_those_of_the_oracle(row: dict[str, str]):
    path = next(p for p in (TRACES / row["file"], TRACES / f"{row['file']}.gz") if p.exists())
    results = analysed(path)
    assert {r.status for r in results.values()} <= {"ok", "findings", "not_measured"}
    busy, span = (float(row[column]) * 1000 for column in ("busy_union_all_us", "span_us"))
    near = {"rel": 0.001, "abs": 2}  # ns: the oracle is rounded to whole ones
    assert results["truth"].metric("gpu_time_ns") == pytest.approx(busy, **near)
    assert results["launch-gaps"].metric("wall_ns") == pytest.approx(span, **near)
    assert results["launch-gaps"].metric("idle_ns") == pytest.approx(span - busy, rel=0.001, abs=0.001 * busy + 2)
    if results["launch-gaps"].status != "not_measured":
        table = results["launch-gaps"].tables["over_time"]
        assert sum(ns or 0 for ns in table["idle_ns"]) == results["launch-gaps"].metric("idle_ns")


def test_the_straggler_of_four_is_the_one_whose_host_sleeps():
    """Rank 2 sleeps 1.001 s in each of three steps; the others are busy because they wait for it in NCCL."""
    folder = next(TRACES.glob("pytorch+torchrec/**/sst_long_a2a_optimizer"), None)
    if folder is None:
        pytest.skip("the torchrec traces are not in the shared folder")
    found = {}
    for path in sorted(folder.glob("*.json*")):
        gaps = analysed(path)["launch-gaps"]
        found[path.name] = ([f.rule for f in gaps.findings], gaps.metric("idle_host_ns") / 1e9)
    assert len(found) == 4
    slept = {name: seconds for name, (rules, seconds) in found.items() if rules == ["host-bound"]}
    assert ["_21149." in name for name in slept] == [True]
    assert 3.003 < next(iter(slept.values())) < 3.2
    assert all(rules == [] and seconds < 0.2 for name, (rules, seconds) in found.items() if name not in slept)
