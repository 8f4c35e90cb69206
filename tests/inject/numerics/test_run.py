"""Whole runs: ``spikeprof run --numerics`` of programs in processes of their own, on the CPU, with a fake libcupti."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from inject.harness import Lab, Run

from spikeprof.profiler.errors import UsageError
from spikeprof.profiler.session import RunOptions

#: torch without CUDA never tells of its first use of it.
ACTIVATE = """
import sys
import torch
import _spikeprof.hooks
from torch import nn
_spikeprof.hooks.the_agent().activate()
torch.set_num_threads(1)
"""


@pytest.fixture
def real(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab with torch itself."""
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lab


def scans(run: Run) -> list[dict[str, Any]]:
    rows = run.trace.table("tensor_stats").to_pylist()
    return sorted(rows, key=lambda row: (row["rank"], row["step"], row["order"]))


def test_a_model_is_found_by_itself_and_its_first_bad_module_named(real: Lab) -> None:
    run = real.record(
        ACTIVATE
        + """
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).half()
with torch.no_grad():
    for step in range(30):
        if step == 20:
            model[0].weight.fill_(60000.0)
        model(torch.ones(2, 8).half())
print(len(model[0]._forward_hooks))
sys.exit(3)
""",
        numerics_every=2,
    )
    assert run.code == 3
    rows = scans(run)
    assert len(rows) == 15 * 3
    bad = [row for row in rows if row["inf_count"] + row["nan_count"]]
    assert (bad[0]["step"], bad[0]["module"], bad[0]["class_name"], bad[0]["inf_count"]) == (20, "0", "Linear", 16)
    assert {row["step"] for row in bad} == {20, 22, 24, 26, 28}
    assert run.trace.manifest.collectors["numerics"].state == "ok"
    window = run.trace.manifest.duration_ns
    assert all(0 < row["t_ns"] <= window for row in rows)


def test_a_program_may_name_the_model_itself(real: Lab) -> None:
    source = Path(__file__).resolve().parents[3] / "src"
    run = real.record(
        f"import sys; sys.path.insert(0, {str(source)!r})"
        + ACTIVATE
        + """
import spikeprof
watched, other = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
handle = spikeprof.watch(watched, modules=("0",))
for model in (other, watched):
    model(torch.ones(1, 2))
assert handle.stats() == []
"""
    )
    assert run.code == 0
    assert [row["module"] for row in scans(run)] == ["0"]


def test_a_killed_program_leaves_what_was_written(real: Lab) -> None:
    run = real.record(
        ACTIVATE
        + """
import os, signal, time
model = nn.Sequential(nn.Linear(2, 2))
for _ in range(10):
    model(torch.ones(1, 2))
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
""",
        numerics_every=1,
    )
    assert run.code == 128 + 9
    assert len(scans(run)) == 10


def test_a_forked_child_is_left_alone_and_the_budget_holds(real: Lab) -> None:
    run = real.record(
        ACTIVATE
        + """
import os, time
model = nn.Sequential(nn.Linear(2, 2))
model(torch.ones(1, 2))
pid = os.fork()
if not pid:
    model(torch.ones(1, 2))
    os._exit(len(model[0]._forward_hooks))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
time.sleep(0.3)  # the first record is written; the next ones may come to more than the budget at once
for _ in range(500):
    model(torch.ones(1, 2))
until = time.monotonic() + 20
while model[0]._forward_hooks and time.monotonic() < until:
    time.sleep(0.01)
assert not model[0]._forward_hooks
""",
        numerics_every=1,
        max_bytes=20_000,
    )
    assert run.code == 0
    assert 1 <= len(scans(run)) < 20_000 / 128
    assert any("numerics: --max-bytes 20000 reached" in note for note in run.trace.manifest.notes)


def test_what_is_compiled_is_watched_as_a_whole(real: Lab) -> None:
    run = real.record(
        ACTIVATE
        + """
import torch._dynamo as dynamo
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
with torch.no_grad():
    model(torch.ones(1, 4))
    compiled = torch.compile(model, backend="eager")
    for value in (1.0, 2.0, float("inf")):
        compiled(torch.full((1, 4), value))
assert dynamo.utils.counters["stats"]["unique_graphs"] == 1, dynamo.utils.counters
assert not dynamo.utils.counters["graph_break"], dynamo.utils.counters
""",
        numerics_every=1,
    )
    assert run.code == 0
    rows = scans(run)
    assert [row["module"] for row in rows[:2]] == ["0", "1"]
    assert [(row["class_name"], row["inf_count"] + row["nan_count"] > 0) for row in rows[2:]] == [
        ("OptimizedModule", False), ("OptimizedModule", False), ("OptimizedModule", True),
    ]  # fmt: skip


def test_without_the_option_none_of_it_is_loaded_and_nothing_is_told(real: Lab) -> None:
    program = (
        ACTIVATE
        + """
model = nn.Sequential(nn.Linear(2, 2))
for value in (1.0, float("inf")):
    model(torch.full((1, 2), value))
assert not [m for m in sys.modules if 'numerics' in m]
"""
    )
    running = real.start(sys.executable, real.program(program))
    _, err = running.communicate()
    assert running.returncode == 0, err
    assert b"alert" not in err
    assert not (real.folder / "trace" / "alerts.jsonl").exists()
    trace = real.opened()
    assert "tensor_stats" not in trace
    assert "numerics" not in trace.manifest.collectors


def test_a_fault_while_records_are_written_ends_the_watch_alone(real: Lab) -> None:
    run = real.record(
        ACTIVATE
        + """
import time
from _spikeprof.numerics import looks
looks.Looks.drain = lambda *_: 1 / 0
model = nn.Sequential(nn.Linear(2, 2))
model(torch.ones(1, 2))
until = time.monotonic() + 20
while model[0]._forward_hooks and time.monotonic() < until:
    time.sleep(0.01)
assert not model[0]._forward_hooks
""",
        numerics_every=1,
    )
    assert run.code == 0
    assert any("numerics are not checked any more: ZeroDivisionError" in note for note in run.trace.manifest.notes)
    assert run.trace.manifest.collectors["activity"].state == "ok"


def test_a_program_without_torch_is_told_that_nothing_was_checked(lab: Lab) -> None:
    run = lab.record("import cupy; cupy.launch(1)", numerics_every=1)
    assert run.code == 0
    assert run.trace.manifest.collectors["numerics"].state == "refused"


def test_roles_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="--numerics-roles 'kv'"):
        RunOptions(numerics_every=1, numerics_roles=("kv",))
