from __future__ import annotations

import json
import runpy
import sys

import pytest
from paths import ROOT

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `kernels`)")

SCRIPT = str(ROOT / "benchmarks" / "numerics_faults.py")


def test_what_is_said_of_ten_faults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--device", "cpu", "--no-cost", "--json"])
    threads = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit) as end:  # in this process, which has torch already
            runpy.run_path(SCRIPT, run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    out, err = capsys.readouterr()
    assert not end.value.code, err
    report = json.loads(out)
    found = {fault: said["spikeprof"] for fault, said in report["found"].items()}
    assert len(found) == 10
    assert found.pop("NaN in a gradient, none in forward") == "seen"  # of the module before it
    assert set(found.values()) == {"found"}
    assert report["sound_model"]["spikeprof"] == []
    assert report["cost_ratio"] == {}
