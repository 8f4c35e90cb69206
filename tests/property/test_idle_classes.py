"""Classes of idle time against an independent, slow classifier that walks through every nanosecond."""

from __future__ import annotations

from collections import Counter

import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeprof.analyzers.derived import CLASSES
from spikeprof.analyzers.launch_gaps import LaunchGaps

END = 64
LIMIT_NS = 4
SLOW_NS = 2
NAMES = ("cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemcpy", "cudaStreamSynchronize", "cudaMalloc")
LAUNCHES, COPIES = NAMES[:2], NAMES[2:3]
WAITS = NAMES[3:5]

times = st.tuples(st.integers(0, END - 1), st.integers(1, 9)).map(lambda t: {"start_ns": t[0], "end_ns": t[0] + t[1]})


def rows(most: int, **columns: st.SearchStrategy) -> st.SearchStrategy:
    row = st.tuples(times, st.fixed_dictionaries(columns)).map(lambda pair: {**pair[0], **pair[1]})
    return st.lists(row, max_size=most).map(lambda found: sorted(found, key=lambda r: r["start_ns"]))


rank, device, ids = st.integers(0, 1), st.integers(0, 1), st.integers(0, 6)
work = {
    "rank": rank,
    "device": device,
    "stream": st.integers(1, 2),
    "correlation_id": ids,
    "graph_id": st.integers(0, 1),
}
traces = st.fixed_dictionaries(
    {
        "kernels": rows(8, **work),
        "memory_ops": rows(3, **work),
        "runtime_calls": rows(
            10, rank=rank, thread_id=st.integers(1, 2), correlation_id=ids, name=st.sampled_from(NAMES)
        ),
        "overheads": rows(2, rank=rank, kind=st.sampled_from(("buffer_flush", "lazy_function_loading"))),
    }
)


@st.composite
def programs(draw: st.DrawFn) -> dict[str, list[dict]]:
    """Threads that make one call after another, most of which launch work that starts a little later."""
    tables: dict[str, list[dict]] = {name: [] for name in ("kernels", "memory_ops", "runtime_calls", "overheads")}
    for thread in range(draw(st.integers(1, 2))):
        now, call_rank = draw(st.integers(0, 4)), draw(rank)
        for pause, length, name, delay, busy in draw(st.lists(calls_and_work, min_size=2, max_size=5)):
            now += pause
            number = len(tables["runtime_calls"]) + 1
            call = {"rank": call_rank, "thread_id": thread + 1, "correlation_id": number, "name": name}
            tables["runtime_calls"].append({**call, "start_ns": now, "end_ns": now + length})
            if name not in {"cudaMalloc", "cudaStreamSynchronize"}:
                op = {"rank": call_rank, "device": 0, "stream": thread % 2 + 1, "correlation_id": number}
                table = "memory_ops" if "Memcpy" in name else "kernels"
                tables[table].append({**op, "start_ns": now + delay, "end_ns": now + delay + busy})
            now += length
    return {name: sorted(found, key=lambda r: r["start_ns"]) for name, found in tables.items()}


calls_and_work = st.tuples(
    st.integers(0, LIMIT_NS + 2), st.integers(1, 3), st.sampled_from(NAMES), st.integers(0, 6), st.integers(1, 2)
)


def covered(intervals: list[dict], t: int) -> bool:
    return any(r["start_ns"] <= t < r["end_ns"] for r in intervals)


def slow_classes(tables: dict[str, list[dict]]) -> dict[int, Counter[str]]:
    """Nanoseconds of each class on each device, by the definitions in ``derived/idle.py``, one at a time."""
    ops = [{**r, "copy": False} for r in tables["kernels"]] + [{**r, "copy": True} for r in tables["memory_ops"]]
    ops.sort(key=lambda r: r["start_ns"])
    found = {}
    for device in sorted({r["device"] for r in ops}):
        mine = [r for r in ops if r["device"] == device]
        first, last = min(r["start_ns"] for r in mine), min(END, max(r["end_ns"] for r in mine))
        found[device] = Counter(class_of(t, mine, tables) for t in range(first, last) if not covered(mine, t))
    return found


def class_of(t: int, mine: list[dict], tables: dict[str, list[dict]]) -> str:
    gap_start = max(r["end_ns"] for r in mine if r["end_ns"] <= t)
    before = [r for r in mine if r["end_ns"] == gap_start][-1]
    after = next(r for r in mine if r["start_ns"] > t)
    calls = tables["runtime_calls"]
    launch, launch_before = origin(after, calls), origin(before, calls)
    same = all(before[c] == after[c] for c in ("rank", "stream")) and not before["copy"]
    own = [r for r in tables["overheads"] if r["rank"] == after["rank"] and r["kind"] == "buffer_flush"]
    if covered(own, t):
        found = "cupti_overhead"
    elif launch is None:
        found = "unknown"
    elif after.get("graph_id") and launch is launch_before:
        found = "device"
    elif launch["end_ns"] <= gap_start:
        found = "device" if same else "dependency"
    elif covered([r for r in tables["overheads"] if r["rank"] == after["rank"] and r not in own], t):
        found = "loading"
    elif t >= launch["start_ns"] and launch["name"] in COPIES + WAITS:
        found = "memcpy"
    elif t >= launch["start_ns"]:
        same_thread = [c for c in calls if all(c[k] == launch[k] for k in ("rank", "thread_id"))]
        found = "loading" if covered(slow(same_thread), t) else "launch"
    else:
        found = class_of_host(t, [c for c in calls if all(c[k] == launch[k] for k in ("rank", "thread_id"))])
    return found


def slow(calls: list[dict]) -> list[dict]:
    return [
        c
        for c in calls
        if c["name"] in LAUNCHES and c["name"] != "cudaGraphLaunch" and c["end_ns"] - c["start_ns"] > SLOW_NS
    ]


def class_of_host(t: int, calls: list[dict]) -> str:
    """What a thread with these calls was doing at ``t``."""
    for names, found in ((WAITS, "sync"), (COPIES, "memcpy"), (LAUNCHES, "launch")):
        if covered([c for c in calls if c["name"] in names], t):
            return "loading" if found == "launch" and covered(slow(calls), t) else found
    known = [c for c in calls if c["name"] != "cudaMalloc"]
    for i in range(1, len(known)):
        free = max(c["end_ns"] for c in known[:i])
        pair = {known[i - 1]["name"], known[i]["name"]} <= set(LAUNCHES + COPIES)
        if pair and known[i]["start_ns"] - free <= LIMIT_NS and free <= t < known[i]["start_ns"]:
            return "launch"
    return "host"


def origin(op: dict, calls: list[dict]) -> dict | None:
    key = (op["rank"], op["correlation_id"])
    first = next((c for c in calls if key == (c["rank"], c["correlation_id"]) and key[1] != 0), None)
    return first if first and "Synchronize" not in first["name"] else None  # what only waits launches nothing


@settings(max_examples=400)
@given(st.one_of(traces, programs()))
def test_every_nanosecond_of_idle_time_has_the_class_that_its_definition_gives(tables):
    trace = tiny.trace(duration_ns=END, **tables)
    result = LaunchGaps(min_known_origin_share=0.0, dispatch_limit_ns=LIMIT_NS, slow_launch_ns=SLOW_NS).analyze(trace)
    expected = slow_classes(tables)
    if not expected:
        assert result.status == "not_applicable"
        return
    assert result.status in ("ok", "findings")
    table = result.tables["devices"]
    assert table["device"] == list(expected)
    for i, device in enumerate(table["device"]):
        got = {name: table[f"{name}_ns"][i] for name in CLASSES}
        assert got == {name: expected[device][name] for name in CLASSES}
        assert sum(got.values()) == table["idle_ns"][i]
    # the same time again, over time and as metrics
    over_time = result.tables["over_time"]
    assert sum(ns or 0 for ns in over_time["idle_ns"]) == result.metric("idle_ns")
    assert sum(result.metric(f"idle_{name}_ns") for name in CLASSES) == result.metric("idle_ns")
    for finding in result.findings:
        assert finding.saving.upper_bound_ns <= result.metric("wall_ns")
