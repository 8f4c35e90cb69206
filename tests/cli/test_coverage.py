from __future__ import annotations

import json
from pathlib import Path

import pytest
from analyzers.test_fusion_coverage import FUSED, GEMM, MUL, SILU, recorded
from cli.command import Here, refusal, runner, spikeprof

from spikeprof.profiler import store


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    return runner(monkeypatch, capfd)


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    """An eager recording, nothing of it fused, and a compiled one."""
    found = []
    for name, kernels in (("eager", (GEMM, SILU, MUL)), ("compiled", (GEMM, FUSED))):
        folder = store.create_folder(tmp_path / name)
        store.write_trace(folder, recorded(*kernels))
        found.append(folder)
    return found[0], found[1]


def policy(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_several_sources_and_a_policy(here: Here, traces: tuple[Path, Path], tmp_path: Path) -> None:
    rule = policy(tmp_path / "p.yaml", "require:\n  fusion.time: 30 %\n  functions: 30 %\n")
    run = spikeprof("coverage", *traces, "--policy", rule, "-o", tmp_path / "c.json")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("Fusion coverage of eager, compiled\n")
    assert "33.3 %" in run.stdout  # 1,000 of 3,000 ns
    merged = json.loads((tmp_path / "c.json").read_text())
    assert merged["functions"] == {SILU: 0, MUL: 0, FUSED: 1}
    assert merged["fusion"]["launches"] == {"fused": 1, "fusible": 3, "all": 5}
    again = here("coverage", tmp_path / "c.json", traces[0], "--json")
    assert json.loads(again.stdout)["fusion"]["time"] == {"fused": 1000, "fusible": 5000, "all": 8000}


def test_a_policy_that_fails_is_exit_code_1(here: Here, traces: tuple[Path, Path], tmp_path: Path) -> None:
    rule = policy(tmp_path / "p.json", '{"require": {"fusion.time": 0.5, "lines": 0.1}}')
    why = (
        f"spikeprof: --policy {rule}: fusion.time is 0 %, required: ≥ 50 %\n"
        f"spikeprof: --policy {rule}: lines was not measured: no source names lines\n"
    )
    run = here("coverage", traces[0], "--policy", rule)
    assert (run.returncode, run.stderr) == (1, why)
    run = here("analyze", traces[0], "--policy", rule, "--json")
    assert (run.returncode, run.stderr) == (1, why)
    assert json.loads(run.stdout)["version"] == 1
    rule = policy(tmp_path / "q.json", '{"require": {"fusion.time": 0.5}}')
    run = here("analyze", traces[1], "--policy", rule, "--fail-on", "critical")
    assert (run.returncode, run.stderr) == (0, "")


def test_what_cannot_be_read_is_refused_before_any_work(here: Here, traces: tuple[Path, Path], tmp_path: Path) -> None:
    bad = policy(tmp_path / "p.yaml", "require: {fusion.tme: 1}")
    for verb in ("coverage", "analyze"):
        run = here(verb, traces[0], "--policy", bad)
        assert run.returncode == 3
        assert refusal(run) == f"the policy {bad}: there is no measure 'fusion.tme': did you mean fusion.time?"
    run = here("coverage", tmp_path / "nothing")
    assert run.returncode == 3
    assert "nothing" in refusal(run)
    run = here("coverage", policy(tmp_path / "a.info", "no"))
    assert (run.returncode, refusal(run)) == (3, "a.info is no LCOV file: it counts nothing")


def test_only_an_earlier_coverage_is_replaced(here: Here, traces: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    for _ in range(2):
        assert here("coverage", traces[1], "-o", out).returncode == 0
    assert out.stat().st_mode & 0o777 == 0o600
    out.write_text("mine")
    run = here("coverage", traces[1], "-o", out)
    assert run.returncode == 4
    assert "is not a spikeprof report" in refusal(run)
    assert out.read_text() == "mine"
