"""Ranges that a program marks itself."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from inject.harness import Lab

import spikeprof
from spikeprof.profiler.inject import marks


def ranges(lab: Lab, program: str) -> list[dict[str, object]]:
    run = lab.record(program)
    assert run.code == 0
    assert run.trace is not None
    return run.trace.table("ranges").to_pylist()


def test_marks_become_ranges_in_order_of_time_with_their_attributes(lab: Lab) -> None:
    rows = ranges(
        lab,
        """
        import cupy, spikeprof, time
        before = time.time_ns()
        with spikeprof.step("decode", batch=8, tokens=8, layer=3):
            with spikeprof.stage("sampling"):
                cupy.launch(3)
            with spikeprof.request("r-17", request_class="realtime"):
                pass
        """,
    )
    assert [(row["kind"], row["name"]) for row in rows] == [
        ("step", "decode"),
        ("stage", "sampling"),
        ("request", "r-17"),
    ]
    assert json.loads(str(rows[0]["attributes"])) == {"llm.batch_size": 8, "llm.token_usage.total": 8, "layer": 3}
    assert rows[1]["attributes"] == ""
    assert json.loads(str(rows[2]["attributes"])) == {"llm.request_id": "r-17", "llm.request_class": "realtime"}
    step, stage, _ = rows
    assert step["start_ns"] <= stage["start_ns"] <= stage["end_ns"] <= step["end_ns"]


def test_ranges_know_their_thread_as_calls_do(lab: Lab) -> None:
    rows = ranges(
        lab,
        """
        import cupy, spikeprof, threading
        def work():
            with spikeprof.step("one"):
                cupy.launch(1)
        cupy.launch(1)
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """,
    )
    assert len(rows) == 2
    assert all(0 < int(str(row["thread_id"])) < 2**32 for row in rows)


def test_a_forked_child_does_not_write_its_parents_ranges(lab: Lab) -> None:
    rows = ranges(
        lab,
        """
        import os, spikeprof
        with spikeprof.step("parent"):
            pass
        if not os.fork():
            import cupy
            cupy.launch(1)
            with spikeprof.step("child"):
                pass
            raise SystemExit
        os.wait()
        import cupy
        cupy.launch(1)
        """,
    )
    assert sorted(str(row["name"]) for row in rows) == ["child", "parent"]
    assert len({row["rank"] for row in rows}) == 2


class Written:
    """Stands for the event file."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, **fields: Any) -> None:
        self.events.append(fields)


def test_what_waits_is_bounded_and_the_rest_counted_once() -> None:
    marks.forget()
    for _ in range(marks._WAITING_MAX + 5):
        with marks.Mark("stage", "s", {}):
            pass
    written = Written()
    for _ in range(3):
        marks.write(written)
    with marks.Mark("stage", "t", {}):
        pass
    marks.write(written)
    assert [(len(e["ranges"]), e["dropped"]) for e in written.events] == [(marks._WAITING_MAX, 5), (1, 0)]


def test_what_comes_too_fast_is_counted_and_odd_attributes_do_no_harm(lab: Lab) -> None:
    run = lab.record(
        """
        import cupy, spikeprof
        with spikeprof.stage("odd", what=object(), far=float("inf"), none=float("nan")):
            cupy.launch(1)
        for _ in range(400_000):
            with spikeprof.stage("s"):
                pass
        """
    )
    assert run.code == 0
    rows = run.trace.table("ranges").to_pylist()
    assert json.loads(rows[0]["attributes"]) == {"what": "<object>", "far": "inf", "none": "nan"}
    lost = [int(note.split()[0]) for note in run.trace.manifest.notes if "came too fast" in note]
    assert len(rows) + sum(lost) == 400_001  # how many depends on how fast this machine is
    assert len(rows) >= 65536


def test_without_a_recording_marks_do_nothing() -> None:
    assert spikeprof.step("decode", batch=1) is spikeprof.stage("s")
    with spikeprof.request(7):
        pass
    code = (
        "import sys, spikeprof\nwith spikeprof.step('x'): pass\n"
        "assert 'numpy' not in sys.modules and 'pyarrow' not in sys.modules, 'a marker must cost the program nothing'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
