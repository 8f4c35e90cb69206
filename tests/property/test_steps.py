"""Steps are found where they are: random models, noise, start-up, pauses, graphs, several processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeprof.analyzers.derived.steps import find_steps
from spikeprof.analyzers.runner import run_one
from spikeprof.analyzers.steps import Steps
from spikeprof.profiler.trace import Trace

Rows = list[dict[str, Any]]


def model(random: np.random.Generator, layers: int) -> list[str]:
    """The kernel names of one step: something before, layers that are alike, something after."""
    layer = [f"layer_{i}" for i in range(random.integers(3, 12))]
    layer += list(random.choice(layer, random.integers(0, 4)))  # a name may occur several times in a layer
    return [
        *(f"before_{i}" for i in range(random.integers(1, 4))),
        *layer * layers,
        *(f"after_{i}" for i in range(random.integers(2, 5))),
    ]


def recorded(
    random: np.random.Generator, names: list[str], steps: int, noise: float, at: int = 0, **same: Any
) -> tuple[Rows, list[int]]:
    """The kernels of a start-up and of the steps, and the begin of each step. Grids of one name grow."""
    rows: Rows = []
    begins = []
    for _ in range(random.integers(0, 300)):
        at += int(random.integers(500, 200_000))
        rows.append({"name": f"start_{random.integers(20)}", "start_ns": at, "end_ns": at + 400, **same})
        at += 400
    for step in range(steps):
        at += int(random.integers(6_000, 9_000))
        begins.append(at)
        for place, name in enumerate(names):
            inner = 0 < place < len(names) - 1
            if inner and random.random() < noise:
                continue
            length = int(random.integers(800, 3_000))
            grid = 100 + step if name == "layer_1" else 4
            rows.append({"name": name, "grid_x": grid, "start_ns": at, "end_ns": at + length, **same})
            at += length + int(random.integers(0, 2_000))
            if inner and random.random() < noise:
                rows.append({"name": f"rare_{random.integers(5)}", "start_ns": at, "end_ns": at + 500, **same})
                at += 500
    return rows, begins


def traced(rows: Rows, **tables: Any) -> Trace:
    rows = sorted(rows, key=lambda row: row["start_ns"])
    return tiny.trace(duration_ns=rows[-1]["end_ns"] + 1, kernels=rows, **tables)


seeds, layer_counts, step_counts = st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(6, 30)


@settings(max_examples=60, deadline=None)
@given(seeds, layer_counts, step_counts, st.sampled_from([0.0, 0.0, 0.005, 0.02]))
def test_found_steps_are_the_true_ones(seed: int, layers: int, steps: int, noise: float):
    random = np.random.default_rng(seed)
    names = model(random, layers)
    rows, begins = recorded(random, names, steps, noise)
    (found,) = find_steps(traced(rows))
    in_steps = sum(row["start_ns"] >= begins[0] for row in rows)
    if in_steps < 0.55 * len(rows):
        return  # too little of the recording is steps for any to be said to be found
    assert found.source == "found", found.reason
    # Of the last step it cannot be known whether it is whole when it lacks some kernels.
    assert found.begin_ns.tolist() in ((begins, begins[:-1]) if noise else (begins,))
    assert int(found.kernels.sum()) <= in_steps
    assert found.confidence <= in_steps / len(rows)
    if not noise:
        assert found.end_ns[-1] == rows[-1]["end_ns"]
        assert found.confidence == in_steps / len(rows)


@settings(max_examples=25, deadline=None)
@given(seeds, layer_counts, step_counts)
def test_processes_and_streams_do_not_disturb_one_another(seed: int, layers: int, steps: int):
    random = np.random.default_rng(seed)
    names = model(random, layers)
    all_rows: Rows = []
    true = {}
    for rank in (0, 1):
        rows, true[rank] = recorded(random, names, steps, 0.0, at=rank * 777, rank=rank, device=rank)
        rows = [row for row in rows if not row["name"].startswith("start")]
        first, last = rows[0]["start_ns"], rows[-1]["start_ns"]
        beside = random.integers(first, last, len(rows) // 8).tolist()
        more = {"rank": rank, "device": rank, "stream": 20, "name": "all_reduce"}
        all_rows += rows + [{**more, "start_ns": at, "end_ns": at + 100} for at in beside]
    found = find_steps(traced(all_rows))
    assert [(steps.rank, steps.begin_ns.tolist()) for steps in found] == sorted(true.items())


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(8, 40), st.integers(0, 6))
def test_graph_replays_are_steps_with_what_runs_beside_them(seed: int, steps: int, eager: int):
    random = np.random.default_rng(seed)
    rows: Rows = []
    begins, at = [], 0
    for step in range(steps):
        at += int(random.integers(5_000, 8_000))
        begins.append(at)
        for place in range(50):
            node = {"graph_id": 3, "graph_node_id": place + 1, "correlation_id": step + 1}
            rows.append({"name": f"layer_{place % 7}", "start_ns": at, "end_ns": at + 900, **node})
            at += 1_000
        for place in range(eager):
            rows.append({"name": f"sample_{place}", "start_ns": at, "end_ns": at + 900, "correlation_id": 0})
            at += 1_000
    (found,) = find_steps(traced(rows))
    assert found.begin_ns.tolist() == begins
    assert set(found.kernels.tolist()) == {50 + eager}
    assert found.confidence == 1


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(2, 40), st.integers(100, 2_000))
def test_no_steps_are_found_in_chance(seed: int, names: int, kernels: int):
    random = np.random.default_rng(seed)
    starts = np.cumsum(random.integers(1_000, 9_000, kernels))
    rows = [
        {"name": f"kernel_{n}", "start_ns": int(at), "end_ns": int(at) + 900}
        for at, n in zip(starts, random.integers(0, names, kernels), strict=True)
    ]
    (found,) = find_steps(traced(rows))
    assert found.source == "", (found.confidence, len(found.begin_ns))
    assert found.reason
    assert found.confidence is None


@settings(max_examples=80, deadline=None)
@given(seeds, st.integers(1, 400))
def test_whatever_was_recorded_steps_are_in_order_and_no_kernel_is_in_two(seed: int, count: int):
    random = np.random.default_rng(seed)
    of = random.integers(1, 12)  # how often things recur
    starts = np.sort(random.integers(0, random.choice([500, 100_000]), count))
    rows = [
        {
            "name": str(random.choice(["gemm", "attention", "norm"]) if seed % 5 == 0 else "attn") + str(i % of),
            "rank": int(random.integers(2)) if seed % 7 == 0 else 0,
            "stream": int(random.integers(2)) if seed % 11 == 0 else 7,
            "graph_id": int(random.integers(3)) if seed % 2 else 0,
            "correlation_id": int(random.integers(1 + count // of)),
            "grid_x": int(random.choice([1, 64])),
            "start_ns": int(at),
            "end_ns": int(at + random.integers(0, 400)),
        }
        for i, at in enumerate(starts)
    ]
    cut = int(random.integers(0, 100_001))
    windows = [
        {"rank": rank, "start_ns": a, "end_ns": b, "state": state}
        for a, b, state in ((0, cut, "traced"), (cut, cut + 200, "clean"), (cut + 200, 200_000, "traced"))
        for rank in (0, 1)
    ]
    calls = [{"name": "cudaLaunchKernel", "start_ns": i, "end_ns": i, "correlation_id": i} for i in range(count)]
    ranges = [{"kind": "step", "start_ns": 7 * i, "end_ns": 7 * i + int(random.integers(12))} for i in range(count)]
    more = {"runtime_calls": calls, "ranges": ranges} if seed % 3 == 0 else {}
    trace = traced(rows, memory_ops=[], windows=windows, **more)
    for steps in find_steps(trace):
        assert (steps.confidence is None) == (steps.source == "") == bool(steps.reason) == (len(steps.begin_ns) == 0)
        assert len(steps.begin_ns) == len(steps.end_ns) == len(steps.kernels) == len(steps.kind) == len(steps.follows)
        assert (np.diff(steps.begin_ns) >= 0).all()
        assert (steps.kernels > 0).all()
        assert (steps.end_ns >= steps.begin_ns).all()
        assert steps.kernels.sum() <= steps.kernels_total
        assert steps.confidence is None or 0 < steps.confidence <= 1
        if steps.source == "found":
            assert (steps.end_ns[:-1] <= steps.begin_ns[1:]).all()
    result = run_one(trace, Steps())
    assert result.status != "error", result.reason


LAYER = ("norm", "qkv", "rope", "cache", "attention", "out", "norm", "up", "silu", "down")
PER_TOKEN = ("embed", "norm", "rope", "cache", "silu")


class Engine:
    """What an engine launches over a run: kernels one by one, or as a replay of a graph."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.rows: Rows = []
        self.at = self.replays = 0

    def run(self, names: tuple[str, ...], tokens: int, graph: int = 0) -> None:
        self.replays += 1
        for name in names:
            length = int(self.random.integers(1500, 4000))
            same = {"graph_id": graph, "correlation_id": self.replays if graph else 0}
            grid = tokens if name in PER_TOKEN else 4
            self.rows.append({"name": name, "grid_x": grid, "start_ns": self.at, "end_ns": self.at + length, **same})
            self.at += length + int(self.random.integers(0, 1500))

    def step(self, kind: str, batch: int, tokens: int) -> None:
        prefill = tokens > batch
        if kind == "eager" or (kind == "graphs" and prefill):
            self.run(("embed", *LAYER * 12, "norm", "head", "sample"), tokens)
        elif kind == "graphs":  # one per batch size, and sampling behind it
            self.run(("embed", *LAYER * 12, "norm"), tokens, graph=10 + batch)
            self.run(("head", "sample"), batch)
        elif kind == "piecewise":  # graphs of layers between attention, one by one
            self.run(("embed",), tokens)
            for layer in range(12):
                self.run(LAYER[:4], tokens, graph=100 * batch + layer)
                self.run(LAYER[4:5], tokens)
                self.run(LAYER[5:], tokens, graph=100 * batch + 50 + layer)
            self.run(("norm", "head", "sample"), tokens)
        else:  # speculative: a small model four times, then the large one
            for _ in range(4):
                self.run(("draft_embed", *LAYER * 2, "draft_head", "draft_sample"), batch)
            self.run(("embed", *LAYER * 12, "norm", "head", "verify"), 4 * batch)


@settings(max_examples=10, deadline=None)
@given(seeds, st.sampled_from(["eager", "graphs", "piecewise", "speculative"]))
def test_steps_of_a_server_with_prefills_between_decodes(seed: int, kind: str):
    engine = Engine(seed)
    true: dict[int, str] = {}
    for number in range(100):
        engine.at += int(engine.random.integers(8_000, 20_000))
        prefill = number % 25 == 0 or engine.random.random() < 0.05
        batch = int(engine.random.choice([1, 2, 4, 8]))
        true[engine.at] = "prefill" if prefill else "decode"
        engine.step(kind, batch, int(engine.random.integers(64, 600)) if prefill else batch)
    (found,) = find_steps(traced(engine.rows))
    assert found.begin_ns.tolist() == list(true)
    if kind != "speculative":  # there all rounds are alike
        assert list(found.kind) == list(true.values())
    assert found.confidence > 0.95
