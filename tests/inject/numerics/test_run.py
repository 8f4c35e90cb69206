"""Whole runs: ``spikeprof run --numerics`` of programs in processes of their own, on the CPU, with a fake libcupti."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from inject.harness import Lab, Run

from spikeprof.profiler.errors import UsageError
from spikeprof.profiler.session import RunOptions

#: A program that never uses CUDA.
ON_CPU = """
import os, sys, time
import torch
from torch import nn
torch.set_num_threads(1)
def watched(model):  # what is put into it, and into torch
    return len(model._forward_hooks) + len(model[0]._forward_hooks) + hasattr(nn.Module._call_impl, "__wrapped__")
"""

#: One that does: torch without CUDA never tells of its first use of it.
USES_CUDA = """
import _spikeprof.hooks
_spikeprof.hooks.the_agent().activate()
"""

ACTIVATE = ON_CPU + USES_CUDA


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
print(watched(model))
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
    os._exit(watched(model))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
time.sleep(0.3)  # the first record is written; the next ones may come to more than the budget at once
for _ in range(500):
    model(torch.ones(1, 2))
until = time.monotonic() + 20
while watched(model) and time.monotonic() < until:
    time.sleep(0.01)
assert not watched(model)
""",
        numerics_every=1,
        max_bytes=20_000,
    )
    assert run.code == 0
    found = len(scans(run))
    assert 20_000 - 128 * found < 128 + 32 * 10  # what fits is there: each piece has 32 bytes before it
    assert [row["step"] for row in scans(run)] == list(range(found))
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


def test_a_compiler_that_is_loaded_and_not_used_costs_no_hooks(real: Lab) -> None:
    run = real.record(
        ACTIVATE
        + """
import torch._dynamo as dynamo
from torch._dynamo import utils
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
with torch.no_grad():
    model(torch.ones(1, 4))
    assert nn.Module._call_impl.__wrapped__
    compiled = torch.compile(model, backend="eager")
    assert not hasattr(nn.Module._call_impl, "__wrapped__")
    assert utils.unpatched_nn_module_call_impl is nn.Module._call_impl
    for _ in range(2):
        compiled(torch.ones(1, 4))
        assert not hasattr(nn.Module._call_impl, "__wrapped__")
assert dynamo.utils.counters["stats"]["unique_graphs"] == 1, dynamo.utils.counters
assert not dynamo.utils.counters["graph_break"], dynamo.utils.counters
""",
        numerics_every=1,
    )
    assert run.code == 0
    assert [(row["step"], row["class_name"]) for row in scans(run)][:2] == [(0, "Linear"), (0, "ReLU")]


def test_without_the_option_none_of_it_is_loaded_and_nothing_is_told(real: Lab) -> None:
    program = (
        ACTIVATE
        + """
model = nn.Sequential(nn.Linear(2, 2))
for value in (1.0, float("inf")):
    model(torch.full((1, 2), value))
assert not [m for m in sys.modules if m.startswith('_spikeprof.numerics')]
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
while watched(model) and time.monotonic() < until:
    time.sleep(0.01)
assert not watched(model)
""",
        numerics_every=1,
    )
    assert run.code == 0
    assert any("numerics are not checked any more: ZeroDivisionError" in note for note in run.trace.manifest.notes)
    assert run.trace.manifest.collectors["activity"].state == "ok"


# -- programs that never use CUDA --------------------------------------------------------------------------------------


def test_a_program_on_the_cpu_is_watched_without_a_thread_of_ours(real: Lab) -> None:
    run = real.record(
        ON_CPU
        + """
def mapped(): return sum("cupti" in line for line in open("/proc/self/maps"))
before, mapped_before = len(os.listdir("/proc/self/task")), mapped()  # torch may bring CUPTI itself
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).half()
with torch.no_grad():
    for step in range(6):
        if step == 4:
            model[0].weight.fill_(60000.0)
        model(torch.ones(2, 8).half())
assert len(os.listdir("/proc/self/task")) == before
assert mapped() == mapped_before
sys.exit(3)
""",
        numerics_every=1,
    )
    assert run.code == 3
    assert run.outcome.scans_count == 12
    assert [(row["step"], row["module"]) for row in scans(run) if row["inf_count"]] == [
        (4, "0"), (4, "1"), (5, "0"), (5, "1"),
    ]  # fmt: skip
    notes = run.trace.manifest.collectors
    assert (notes["numerics"].state, notes["activity"].reason) == ("ok", "no process used CUDA")
    assert "kernels" not in run.trace


def test_cuda_may_come_later(real: Lab) -> None:
    run = real.record(
        ON_CPU
        + """
model = nn.Sequential(nn.Linear(2, 2))
for _ in range(70):  # models of other classes are not looked for any more
    model(torch.ones(1, 2))
"""
        + USES_CUDA
        + """
class Other(nn.Sequential):
    pass
Other(nn.Linear(2, 2))(torch.ones(1, 2))
model(torch.ones(1, 2))
time.sleep(0.3)  # our thread writes
assert watched(model) == 1  # the function
os._exit(0)
""",
        numerics_every=1,
    )
    assert run.code == 0
    assert [row["step"] for row in scans(run)] == list(range(72))
    assert run.trace.manifest.collectors["numerics"].state == "ok"


def test_forked_children_on_the_cpu_are_watched_by_themselves(real: Lab) -> None:
    run = real.record(
        ON_CPU
        + """
import multiprocessing
model = nn.Sequential(nn.Linear(2, 2))
model(torch.ones(1, 2))
def work(value):
    assert not watched(model)  # the parent's
    model(torch.full((1, 2), value))
child = multiprocessing.get_context("fork").Process(target=work, args=(float("inf"),))
child.start()
child.join()
model(torch.ones(1, 2))
sys.exit(child.exitcode)
""",
        numerics_every=1,
    )
    assert run.code == 0
    assert [(row["rank"], row["step"], row["nan_count"] + row["inf_count"] > 0) for row in scans(run)] == [
        (0, 0, False), (0, 1, False), (1, 0, True),
    ]  # fmt: skip


def test_what_was_found_on_the_cpu_is_written_as_the_program_goes(real: Lab) -> None:
    run = real.record(
        ON_CPU
        + """
import signal
model = nn.Sequential(nn.Linear(2, 2))
for _ in range(3):
    model(torch.ones(1, 2))
    time.sleep(0.6)
os.kill(os.getpid(), signal.SIGKILL)
""",
        numerics_every=1,
    )
    assert run.code == 128 + 9
    assert 2 <= len(scans(run)) <= 3


@pytest.mark.parametrize(
    ("ending", "said", "options"),
    [
        ("os.unlink(os.environ['SPIKEPROF_CONTROL'])", "numerics: the supervisor is gone", {}),
        ("", "numerics: --max-seconds 0.5 reached", {"max_seconds": 0.5}),
    ],
)
def test_the_watch_on_the_cpu_ends_when_it_is_to(real: Lab, ending: str, said: str, options: dict[str, Any]) -> None:
    run = real.record(
        ON_CPU
        + f"""
model = nn.Sequential(nn.Linear(2, 2))
model(torch.ones(1, 2))
{ending}
time.sleep(0.6)
model(torch.ones(1, 2))
assert not watched(model)
model(torch.ones(1, 2))
""",
        numerics_every=1,
        **options,
    )
    assert run.code == 0
    assert len(scans(run)) == 2
    assert said in " ".join(run.trace.manifest.notes)


def test_a_model_that_the_program_names_is_watched_on_the_cpu(real: Lab) -> None:
    source = Path(__file__).resolve().parents[3] / "src"
    run = real.record(
        f"import sys; sys.path.insert(0, {str(source)!r})"
        + ON_CPU
        + """
import spikeprof
watched, other = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
handle = spikeprof.watch(watched)
for model in (other, watched):
    model(torch.ones(1, 2))
handle.look("pages", torch.full((4,), -128, dtype=torch.int8))
"""
    )
    assert run.code == 0
    assert [(row["module"], row["saturated_count"]) for row in scans(run)] == [("0", 0), ("pages", 4)]


def test_what_is_compiled_on_the_cpu_is_watched_as_a_whole(real: Lab) -> None:
    run = real.record(
        ON_CPU
        + """
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
with torch.no_grad():
    model(torch.ones(1, 4))
    compiled = torch.compile(model, backend="eager")
    for value in (1.0, float("inf")):
        compiled(torch.full((1, 4), value))
""",
        numerics_every=1,
    )
    assert run.code == 0
    assert [(row["class_name"], row["inf_count"] + row["nan_count"] > 0) for row in scans(run)] == [
        ("Linear", False), ("ReLU", False), ("OptimizedModule", False), ("OptimizedModule", True),
    ]  # fmt: skip


@pytest.mark.parametrize("every", [1, 2])
def test_torch_export_meets_nothing_of_ours(real: Lab, every: int) -> None:
    run = real.record(
        ON_CPU
        + """
model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
model(x)
assert torch.equal(torch.export.export(model, (x,), strict=True).module()(x), model(x))
""",
        numerics_every=every,
    )
    assert run.code == 0
    assert [row["class_name"] for row in scans(run)][:2] == ["Linear", "ReLU"]


def test_a_fault_of_ours_before_cuda_leaves_the_recording_of_gpu_work(real: Lab) -> None:
    run = real.record(
        "import _spikeprof.hooks\n_spikeprof.hooks.the_agent()._parts.watch_numerics = lambda *_: 1 / 0\n" + ACTIVATE,
        numerics_every=1,
    )
    assert run.code == 0
    assert any("numerics: ZeroDivisionError" in note for note in run.trace.manifest.notes)
    assert run.trace.manifest.collectors["activity"].state == "ok"
    assert not any("no tensor was scanned" in note for note in run.trace.manifest.notes), "the fault says why"


def test_torch_that_calls_no_module_is_told_apart(real: Lab) -> None:
    run = real.record(ON_CPU + "torch.ones(3).sum()", numerics_every=1)
    assert run.code == 0
    note = run.trace.manifest.collectors["numerics"]
    assert (note.state, note.reason) == ("refused", "no process called a module of torch: nothing was watched")
    assert f"no tensor was scanned: {note.reason}" in run.outcome.warnings


def test_a_pattern_that_picks_no_module_is_told(real: Lab) -> None:
    program = ON_CPU + "torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(1, 2))"
    run = real.record(program, numerics_every=1, numerics_modules=("layer.*",))
    assert run.outcome.scans_count == 0
    assert run.outcome.warnings == ("no tensor was scanned: of the modules that ran none was picked by 'layer.*'",)


def test_a_program_without_torch_is_told_that_nothing_was_checked(lab: Lab) -> None:
    run = lab.record("import cupy; cupy.launch(1)", numerics_every=1)
    assert run.code == 0
    assert run.trace.manifest.collectors["numerics"].state == "refused"


def test_roles_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="--numerics-roles 'kv'"):
        RunOptions(numerics_every=1, numerics_roles=("kv",))
