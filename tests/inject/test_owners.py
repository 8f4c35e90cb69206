"""From a program to the owners of its kernels: what the agent writes is what the tables are made from."""

from __future__ import annotations

import textwrap
from collections import Counter

import pytest
from inject.harness import Lab
from inject.test_attribution import MODEL

from spikeprof.analyzers.ownership import Ownership
from spikeprof.analyzers.runner import run_one
from spikeprof.profiler.trace import Trace

pytestmark = pytest.mark.timeout(60)


def owners(trace: Trace) -> Counter[tuple[str, str]]:
    """Kernels by path of their module (- = none) and match."""
    origins, modules = trace.table("origins").to_pylist(), trace.table("modules").to_pylist()
    found: Counter[tuple[str, str]] = Counter()
    for row in trace.table("kernel_owners").to_pylist():
        module = origins[row["origin_id"]]["module_id"] if row["origin_id"] >= 0 else -1
        found[modules[module]["path"] if module >= 0 else "-", row["match"]] += 1
    return found


def test_launches_of_attributed_steps_own_their_kernels(lab: Lab) -> None:
    program = """
        torch.cuda._lazy_init()
        time.sleep(0.7)
        for _ in range(12):
            step(1, 1)
        """
    run = lab.record(textwrap.dedent(MODEL) + textwrap.dedent(program), attribute_steps=3)
    note = run.trace.manifest.collectors["ownership"]
    assert (run.code, note.state) == (0, "ok")
    found = owners(run.trace)
    step = {"one": 2, "one.mlp": 1, "two": 2, "two.mlp": 1, "-": 1}
    assert {path: found[path, "exact"] for path in step} == {path: 5 * count for path, count in step.items()}
    # Looked at were the first three steps, the sixth and the twelfth; the others launch the same in the same order.
    carried = {path: found[path, "position"] + found[path, "signature"] for path in step}
    assert carried == {path: 7 * count for path, count in step.items()}
    assert found.total() == 12 * 7
    lines = {(row["function"], row["line"]) for row in run.trace.table("stacks").to_pylist()}
    assert {name for name, _ in lines} == {"Layer.forward", "Mlp.forward", "step"}
    result = run_one(run.trace, Ownership())
    assert result.metric("owned_line_share") == 1
    assert result.tables["modules"]["module"] == ["Model", "one", "one.mlp", "two", "two.mlp"]


def test_without_attribution_there_are_no_owners_and_a_reason(lab: Lab) -> None:
    run = lab.record(textwrap.dedent(MODEL) + "torch.cuda._lazy_init()\nstep(1, 1)\n", attribute_steps=0)
    assert run.kernels == 7
    assert "kernel_owners" not in run.trace
    result = run_one(run.trace, Ownership())
    assert (result.status, result.reason) == ("not_measured", "launches were not attributed in this recording")
