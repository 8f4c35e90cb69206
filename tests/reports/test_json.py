from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
from reports import fabricated

from spikeprof.analyzers.base import Metric, Result
from spikeprof.profiler.errors import ForeignFile, NewerSchema
from spikeprof.reports import json_
from spikeprof.reports.build import build_report
from spikeprof.reports.model import REPORT_VERSION

DOC = Path(__file__).parents[2] / "docs" / "report-json.md"


@pytest.mark.parametrize("name", fabricated.ALL)
def test_round_trip(name: str) -> None:
    report = fabricated.ALL[name]()
    data = json_.encode(report)
    assert json_.decode(data) == report
    assert data.endswith(b"}\n")
    assert data.count(b"\n") == 1


def test_round_trip_of_real_results() -> None:
    report = build_report(tiny.trace(kernels=[{"start_ns": 0, "end_ns": 10}], memory_ops=[], runtime_calls=[]), "t")
    assert json_.decode(json_.encode(report)) == report


def test_numbers_that_json_lacks_become_null() -> None:
    result = Result("a", "ok", metrics=(Metric("x_ns", float("nan")),), tables={"t": {"v_ns": [float("inf")]}})
    found = json.loads(json_.encode(fabricated.alone(result)))["results"][0]
    assert found["metrics"][0]["value"] is None
    assert found["tables"]["t"]["v_ns"] == [None]


def test_numpy_scalars_become_numbers() -> None:
    result = Result("a", "ok", tables={"t": {"v_ns": [np.int64(3), np.float64(0.5)]}})
    assert json.loads(json_.encode(fabricated.alone(result)))["results"][0]["tables"]["t"] == {"v_ns": [3, 0.5]}


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"not json", b'{"version": 1}', b"\xff\xfe", b'{"version": "1"}'])
def test_foreign_files_are_refused(data: bytes) -> None:
    with pytest.raises(ForeignFile):
        json_.decode(data)


def test_a_later_version_is_refused() -> None:
    with pytest.raises(NewerSchema, match=str(REPORT_VERSION + 1)):
        json_.decode(json.dumps({"version": REPORT_VERSION + 1, "anything": "else"}).encode())


def test_the_documentation_names_every_key() -> None:
    documented = set(re.findall(r"`([a-z0-9_]+)`", DOC.read_text("utf-8")))
    data = json.loads(json_.encode(fabricated.rich()))
    keys = {*data, *data["manifest"], *data["tables"], *(k for r in data["results"] for k in r)}
    keys |= {k for r in data["results"] for part in ("metrics", "findings", "figures") for row in r[part] for k in row}
    keys |= {k for r in data["results"] for f in r["findings"] for e in f["evidence"] for k in e}
    assert keys <= documented, keys - documented
