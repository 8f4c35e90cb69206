"""Windows in which launches are attributed: when they open, what is seen in them, and that nothing of them stays."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from inject.harness import FAKES, PYTHON, TIMEOUT_S, Lab, Run, check_whole

from spikeprof.profiler.inject import ENV_OPTIONS, ENV_SPOOL, SITE_FOLDER

pytestmark = pytest.mark.timeout(60)

#: A model of two layers: 2 launches in each layer, 1 in its MLP; and one after each call of the model.
MODEL = """
    import threading, time, torch, fakegpu
    from _spikeprof import attribution
    attribution._CLOCK_WINDOWS_MAX = 0

    class Tensor:
        def __init__(self, *shape):
            self.shape = shape
    torch.Tensor = Tensor

    class Mlp(torch.nn.Module):
        def forward(self, x):
            torch.cuda.launch(1)

    class Layer(torch.nn.Module):
        def __init__(self):
            self.mlp = Mlp()
        def forward(self, x):
            torch.cuda.launch(2)
            self.mlp(x)

    class Model(torch.nn.Module):
        def __init__(self):
            self.one, self.two = Layer(), Layer()
        def forward(self, x):
            if x.shape == (13,):
                raise ValueError("thirteen")
            self.one(x)
            self.two(x)

    model = Model()
    original = torch.nn.Module.__dict__["__call__"]
    def step(*shape):
        model(Tensor(*shape))
        torch.cuda.launch(1)
    def hooked():
        return torch.nn.Module.__dict__["__call__"] is not original
    """


class Events:
    """The event file of a program that ran under the agent alone, without a supervisor."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def all(self, kind: str) -> list[Any]:
        return [row for event in self.rows if event["ev"] == kind for row in event[kind]]

    def told(self, *what: str) -> list[str]:
        return [e["reason"] for e in self.rows if e["ev"] == "attribution" and e["what"] in what]

    @property
    def faults(self) -> list[str]:
        return [e["text"] for e in self.rows if e["ev"] == "fault"]

    def owners(self) -> Counter[str]:
        """Launches by path of their module."""
        paths = {index: path for index, _, path, _ in self.all("modules")}
        return Counter(paths.get(launch[1], "-") for launch in self.all("launches"))


def run(lab: Lab, program: str, *, torch: Path = FAKES, **options: Any) -> Events:
    """Run a program with the agent and without a supervisor, whose tables would take their time."""
    spool = lab.folder / "spool"
    spool.mkdir(exist_ok=True)
    for file in spool.iterdir():
        file.unlink()
    path = lab.program(textwrap.dedent(MODEL if torch is FAKES else "") + textwrap.dedent(program))
    env = {
        "PATH": "/usr/bin:/bin",
        "FAKE_CUPTI": str(lab.library),
        "PYTHONPATH": f"{SITE_FOLDER}:{torch}",
        ENV_SPOOL: str(spool),
        ENV_OPTIONS: json.dumps({"libcupti": str(lab.library), **options}),
    }
    python = [PYTHON if torch is FAKES else sys.executable, "-W", "ignore:This process:DeprecationWarning"]  # of forks
    ended = subprocess.run(
        [*python, str(path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert not [line for line in ended.stderr.splitlines() if not line.startswith("USDT")], ended.stderr
    lines = [line for file in sorted(spool.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return Events([json.loads(line) for line in lines])


STEP = Counter({"one": 2, "one.mlp": 1, "two": 2, "two.mlp": 1, "-": 1})


def times(n: int) -> Counter[str]:
    return Counter({path: n * count for path, count in STEP.items()})


def test_the_first_steps_of_each_kind_are_looked_at(lab: Lab) -> None:
    events = run(
        lab,
        """
        torch.cuda._lazy_init()
        step(1, 128)
        for _ in range(20):
            step(1, 1)
        step(1, 120)
        assert hooked()
        """,
        attribute_steps=3,
    )
    # One prefill and three decode steps; the sixth of these and the twelfth; the second prefill.
    assert events.owners() == times(4 + 2 + 1)
    decode = ["steps of Model 1x1"] * 2
    assert events.told("window") == ["steps of Model 1x128", *decode, "steps of Model 1x120"]
    assert events.told("ended") == ["the program ended"]
    assert events.faults == []
    assert {tuple(m[1:]) for m in events.all("modules")} == {
        (-1, "", "Model"), (0, "one", "Layer"), (1, "one.mlp", "Mlp"), (0, "two", "Layer"), (3, "two.mlp", "Mlp"),
    }  # fmt: skip
    stacks = {index: [function.rpartition(".")[2] for _, _, function in lines] for index, lines in events.all("stacks")}
    assert {tuple(stack[:3]) for stack in stacks.values()} >= {
        ("launch", "forward", "forward"),
        ("launch", "step", "<module>"),
    }


def test_kernels_that_come_later_in_steps_of_the_same_kind_are_seen(lab: Lab) -> None:
    """As where attention splits long contexts: from some step on each layer launches one kernel more."""
    run = lab.record(
        textwrap.dedent(MODEL)
        + textwrap.dedent("""
        torch.cuda._lazy_init()
        for n in range(40):
            if n == 16:
                plain = Mlp.forward
                Mlp.forward = lambda self, x: (plain(self, x), torch.cuda.launch(1))[0]
            step(1, 1)
        """)
    )
    assert run.code == 0
    wanted = times(40) + Counter({"one.mlp": 24, "two.mlp": 24})
    assert _by_module(run) == wanted
    matches = _matches(run)
    assert matches["exact"] == (3 + 2) * 7 + 9  # the 1st, 2nd, 3rd, 6th and 12th, and the 24th, which is another
    assert matches["none"] == 0


def test_a_kind_is_not_looked_at_again_where_that_is_too_much(lab: Lab) -> None:
    events = run(
        lab,
        """
        from _spikeprof import hooks
        from _spikeprof.windows import LAUNCHES_MAX
        agent = hooks.the_agent()
        torch.cuda._lazy_init()
        windows = agent._parts.attribution.windows
        windows.left = LAUNCHES_MAX // 2 + 2 * 7 - 1  # the first step, and one more
        for _ in range(50):
            step(1)
        windows.left = LAUNCHES_MAX
        agent.switched = (0, time.monotonic())
        for _ in range(50):
            step(1)
        agent.switched = (0, time.monotonic() - 1)
        step(1)
        """,
        attribute_steps=1,
    )
    assert events.owners() == times(1 + 1 + 1)


def test_kinds_are_looked_at_again_however_many_there_are(lab: Lab) -> None:
    events = run(
        lab,
        """
        torch.cuda._lazy_init()
        class Small(torch.nn.Module):
            def forward(self, x): torch.cuda.launch(1)
        models = [Small() for _ in range(64)]
        for _ in range(6):
            for each in models: each(Tensor(1))
        """,
        attribute_steps=3,
    )
    assert events.owners()[""] == 64 * (3 + 1)  # 64 times 3 are all first steps that there may be
    assert not [told for told in events.told("skipped") if "beyond" in told]


def test_steps_while_nothing_is_recorded_do_not_end_it(lab: Lab) -> None:
    events = run(
        lab,
        """
        attribution.WIDE_STEPS = 5
        torch.cuda._lazy_init()
        from _spikeprof import hooks
        agent = hooks.the_agent()
        agent.set_condition("off", "--window")
        for _ in range(20):
            step(1)
        assert hooked()
        agent.set_condition("off", None)
        time.sleep(0.06)
        for _ in range(3):
            step(1)
        """,
        attribute_steps=2,
    )
    assert events.owners() == times(2)
    assert events.told("ended") == ["the program ended"]


def test_the_trace_says_who_owns_each_kernel(lab: Lab) -> None:
    run = lab.record(
        textwrap.dedent(MODEL)
        + textwrap.dedent("""
        torch.cuda._lazy_init()
        for _ in range(10):
            step(1, 1)
        """)
    )
    assert run.code == 0
    check_whole(run, 70)
    assert _by_module(run) == times(10)
    matches = _matches(run)
    assert matches["exact"] == 4 * 7
    assert matches["none"] == 0


def _matches(run: Run) -> Counter[str]:
    return Counter(run.trace.table("kernel_owners").column("match").cast("string").to_pylist())


def _by_module(run: Run) -> Counter[str]:
    paths = {row["module_id"]: row["path"] for row in run.trace.table("modules").to_pylist()}
    modules = {row["origin_id"]: row["module_id"] for row in run.trace.table("origins").to_pylist()}
    return Counter(
        paths.get(modules.get(row["origin_id"], -1), "-") for row in run.trace.table("kernel_owners").to_pylist()
    )


def test_nothing_when_not_asked_for(lab: Lab) -> None:
    events = run(
        lab,
        """
        step(1)
        assert not hooked()
        assert torch.cuda.CUDAGraph.capture_begin.__name__ == "capture_begin"
        assert not hasattr(torch.cuda.CUDAGraph.capture_begin, "__wrapped__")
        fakegpu.capture(3)
        """,
        attribute_steps=0,
    )
    assert {e["ev"] for e in events.rows} & {"modules", "stacks", "launches", "attribution"} == set()
    nodes = [node for e in events.rows if e["ev"] == "graph_nodes" for node in e["nodes"]]
    assert {tuple(node[4:6]) for node in nodes} == {(-1, -1)}


#: No hook, no listener, no window.
NOTHING_LEFT = """
        from _spikeprof import hooks, marks
        agent = hooks.the_agent()
        assert not hooked() and marks._steps is None
        assert agent.calls._listeners == () and agent.calls._hooked == {}
        assert agent._parts.attribution.windows.current is None
    """


def test_no_hook_is_left_when_enough_was_seen(lab: Lab) -> None:
    events = run(
        lab,
        """
        attribution.WIDE_STEPS = 5
        torch.cuda._lazy_init()
        for n in range(12):
            step(1)
            assert hooked() == (n < 2 + 4 + 2), n  # two looked at, four that were not, and two again
        """
        + NOTHING_LEFT,
        attribute_steps=2,
    )
    # A class of the program's own file is pickled with all that is in it, so it is not watched alone.
    assert events.told("ended") == ["no new kind of step for 5 steps"]


def test_known_models_are_watched_on_for_new_kinds(lab: Lab) -> None:
    lab.program(
        "import torch\nclass Known(torch.nn.Module):\n    def forward(self, x): torch.cuda.launch(1)", "known.py"
    )
    events = run(
        lab,
        """
        import known
        attribution.WIDE_STEPS, attribution.WATCHED_STEPS = 5, 8
        model = known.Known()
        torch.cuda._lazy_init()
        for n in range(9):
            model(Tensor(1))
        assert not hooked() and "__call__" in vars(known.Known)
        for n in range(12):  # four are looked at
            model(Tensor(100))
        assert "__call__" not in vars(known.Known)
        """
        + NOTHING_LEFT,
        attribute_steps=2,
    )
    assert events.told("window") == ["steps of Known 1"] * 3 + ["steps of Known 100"] * 3
    assert events.told("ended") == ["no new kind of step for 8 steps"]


def test_exceptions_pass_and_their_tracebacks_are_the_programs(lab: Lab) -> None:
    events = run(
        lab,
        """
        import traceback
        def text():
            try:
                step(13)
            except ValueError:
                return traceback.format_exc()
        plain = text()
        torch.cuda._lazy_init()
        assert hooked()
        traced = text()
        assert traced == plain or __import__("sys").version_info < (3, 11), traced
        step(1)
        """,
        attribute_steps=1,
    )
    assert events.owners()["one"] == 2
    assert events.faults == []


def test_no_garbage_is_collected_in_the_middle_of_a_launch(lab: Lab) -> None:
    events = run(
        lab,
        """
        import gc, sys
        gc.set_threshold(1)
        inside = []
        def collected(phase, _):
            frame = sys._getframe()
            while frame is not None:
                if frame.f_code.co_name in ("_note", "place", "index", "node_created", "_node"):
                    inside.append(frame.f_code.co_name)
                frame = frame.f_back
        torch.cuda._lazy_init()
        time.sleep(0.2)
        gc.callbacks.append(collected)
        for _ in range(50):
            step(1)
            fakegpu.capture(3)
        gc.callbacks.clear()
        assert not inside, set(inside)
        assert gc.isenabled()
        gc.disable()
        step(100)
        assert not gc.isenabled()
        """,
        attribute_steps=50,
    )
    assert events.owners() == times(51)


def test_launches_of_many_threads(lab: Lab) -> None:
    events = run(
        lab,
        """
        torch.cuda._lazy_init()
        def work(n):
            for _ in range(50):
                step(1 << n)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """,
        attribute_steps=2,
    )
    assert events.faults == []
    assert len({launch[0] for launch in events.all("launches")}) == len(events.all("launches")) >= 8 * 2 * 6
    assert set(events.owners()) == set(STEP)
    assert len(events.all("modules")) == 5


def test_a_step_that_launches_too_much_is_looked_at_in_part(lab: Lab) -> None:
    events = run(
        lab,
        """
        torch.cuda._lazy_init()
        attribution._STEPS_WINDOW = (100, 10.0)
        class Big(torch.nn.Module):
            def forward(self, x):
                torch.cuda.launch(500)
        Big()(Tensor(1))
        time.sleep(0.3)
        """,
        attribute_steps=3,
    )
    assert len(events.all("launches")) == 100
    # Until the agent's thread has switched them off, further ones are called back and counted.
    assert 0 <= sum(e.get("dropped", 0) for e in events.rows if e["ev"] == "launches") <= 400


def test_all_windows_together_are_bounded(lab: Lab) -> None:
    events = run(
        lab,
        """
        import _spikeprof.windows as windows
        windows.LAUNCHES_MAX = 30
        torch.cuda._lazy_init()
        for n in range(12):
            step(1 << n)
        assert not hooked()
        """,
        attribute_steps=3,
    )
    assert len(events.all("launches")) == 30
    assert [reason.partition(" in ")[0] for reason in events.told("ended")] == ["30 launches"]


def test_kinds_beyond_the_limit_are_said_to_be(lab: Lab) -> None:
    events = run(
        lab,
        """
        attribution.KINDS_MAX = 3
        torch.cuda._lazy_init()
        for n in range(6):
            step(1 << n)
        step(1)
        """,
        attribute_steps=2,
    )
    assert events.owners() == times(4)
    assert "kinds of steps beyond the first 3" in events.told("skipped")


def test_marked_steps_are_steps_and_hold_the_modules_in_them(lab: Lab) -> None:
    events = run(
        lab,
        """
        from _spikeprof.marks import Mark
        torch.cuda._lazy_init()
        for _ in range(6):
            with Mark("step", "decode", {"llm.batch_size": 4}):
                step(1)
                step(200)
        """,
        attribute_steps=2,
    )
    assert events.told("window") == ["steps of marked decode"] * 2
    assert events.owners() == times(2 * 3)


def test_where_no_steps_are_known_the_clock_opens_windows(lab: Lab) -> None:
    events = run(
        lab,
        """
        attribution._CLOCK_WINDOWS_MAX = 12
        end = time.time() + 1.2
        while time.time() < end:
            torch.cuda.launch(1)
            time.sleep(0.01)
        """,
        attribute_steps=3,
    )
    assert set(events.told("window")) == {"by the clock: no steps are known"}
    assert 2 <= len(events.told("window")) <= 3
    assert 20 <= events.owners()["-"] < 110


def test_a_program_without_torch(lab: Lab) -> None:
    events = run(
        lab,
        """
        import sys
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]
        attribution._CLOCK_WINDOWS_MAX = 12
        import cupy
        for _ in range(5):
            cupy.launch(1)
            time.sleep(0.05)
        import torch as other
        attribution._CLOCK_WINDOWS_MAX = 0
        other.cuda.launch(1)
        class Late(other.nn.Module):
            def forward(self):
                other.cuda.launch(1)
        time.sleep(0.5)
        Late()()
        """,
        attribute_steps=3,
    )
    assert events.owners()["-"] >= 4
    assert events.owners()[""] == 1


def test_a_guest_gets_its_turn_and_windows_come_again(lab: Lab) -> None:
    events = run(
        lab,
        """
        torch.cuda._lazy_init()
        step(1)
        with torch.autograd.profiler.profile() as profile:
            step(1)
            step(100)
        assert profile.kernels_count == 14
        step(100)
        step(1)
        """,
        attribute_steps=2,
    )
    assert events.owners() == times(3)
    assert events.told("window") == ["steps of Model 1", "steps of Model 100"]
    assert events.faults == []


def test_a_subscription_that_another_holds(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUPTI_FAIL", "subscribe")
    run = lab.record(textwrap.dedent(MODEL) + "torch.cuda._lazy_init()\nstep(1)\nassert not hooked()")
    assert run.code == 0
    check_whole(run, 7)


def test_where_recording_is_switched_by_the_clock_steps_are_looked_at_while_it_is_on(lab: Lab) -> None:
    run = lab.record(
        textwrap.dedent(MODEL)
        + textwrap.dedent("""
        torch.cuda._lazy_init()
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            step(1)
            time.sleep(0.01)
        """),
        window=(0.3, 0.2),
    )
    assert run.code == 0
    off = [(w["start_ns"], w["end_ns"]) for w in run.trace.table("windows").to_pylist() if w["state"] == "off"]
    assert len(off) >= 3
    spans = [(e["t"], e["end"]) for e in _spans(run)]
    assert len(spans) >= 4  # the first three steps, and single ones later on
    assert all(end + 50_000_000 <= begin or start >= until + 50_000_000 for begin, until in off for start, end in spans)
    matches = _matches(run)
    assert matches["none"] < 7 * len(off)  # at most the part of a step that a switch has left


def test_graphs_are_looked_at_wherever_recording_is_switched(lab: Lab) -> None:
    events = run(
        lab,
        """
        class Captured(torch.nn.Module):
            def forward(self, n):
                fakegpu.capture(n)
        step(1)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        Captured()(3)
        graph.capture_end()
        time.sleep(0.5)
        """,
        attribute_steps=3,
        window=[0.04, 0.1],
    )
    assert events.faults == []
    nodes = [node for e in events.rows if e["ev"] == "graph_nodes" for node in e["nodes"]]
    paths = {index: kind for index, _, _, kind in events.all("modules")}
    assert {paths[node[4]] for node in nodes if not node[1] and node[0] < 1000} == {"Captured"}
    assert "no launches are looked at in parts of --window of 0.05 s or less" in events.told("skipped")


@pytest.mark.parametrize(("others", "looked_at"), [(0, 2), (1, 1)])
def test_launches_of_other_threads_end_before_they_are_called_back(lab: Lab, others: int, looked_at: int) -> None:
    """Recording begins with the range: whoever launches then in another thread must be through with it."""
    events = run(
        lab,
        f"""
        torch._C._cudart = None
        step(2)
        over = threading.Event()
        threads = [threading.Thread(target=over.wait) for _ in range({others})]
        for thread in threads: thread.start()
        fakegpu.profiler(1)
        step(1)
        time.sleep(0.2)
        step(10)
        fakegpu.profiler(0)
        over.set()
        """,
        attribute_steps=3,
        capture_range=True,
    )
    assert events.faults == []
    assert events.owners() == times(looked_at)  # both steps, or the later one


def test_duty_windows_and_clean_steps_are_left_alone(lab: Lab) -> None:
    run = lab.record(
        textwrap.dedent(MODEL)
        + textwrap.dedent("""
        torch.cuda._lazy_init()
        for n in range(60):
            step(1 if n < 40 else 100)
            time.sleep(0.005)
        """),
        clean_steps=10,
        attribute_steps=4,
    )
    assert run.code == 0
    clean = [(w["start_ns"], w["end_ns"]) for w in run.trace.table("windows").to_pylist() if w["state"] == "clean"]
    spans = [(e["t"], e["end"]) for e in _spans(run)]
    assert len(clean) == 2
    assert all(end <= begin or start >= until for begin, until in spans for start, end in clean)
    steps = run.trace.table("steps").to_pylist()
    assert not any(begin <= s["start_ns"] < until for begin, until in spans for s in steps)
    assert len(steps) == 24  # of 29: those that were looked at, and the last


def _spans(run: Run) -> list[dict[str, int]]:
    note = run.trace.manifest.collectors["ownership"]
    assert note.state == "ok", note
    launches = run.trace.table("kernel_owners").to_pylist()
    starts = run.trace.column("kernels", "start_ns")
    exact = [int(starts[row["kernel_id"]]) for row in launches if row["match"] == "exact"]
    assert exact
    groups: list[dict[str, int]] = []
    for at in sorted(exact):  # windows, as far as launches show them
        if groups and at - groups[-1]["end"] < 12_000_000:
            groups[-1]["end"] = at + 1
        else:
            groups.append({"t": at, "end": at + 1})
    return groups


def test_outside_of_recording_there_is_no_window(lab: Lab) -> None:
    events = run(
        lab,
        """
        torch._C._cudart = None
        step(1)
        fakegpu.profiler(1)
        step(1)
        fakegpu.profiler(0)
        step(1)
        """,
        attribute_steps=3,
        capture_range=True,
    )
    assert events.owners() == times(1)


def test_nodes_of_graphs_know_module_and_line(lab: Lab) -> None:
    events = run(
        lab,
        """
        class Captured(torch.nn.Module):
            def forward(self, n):
                fakegpu.capture(n)
        torch.cuda._lazy_init()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        Captured()(3)
        graph.capture_end()
        graph.replay()
        """,
        attribute_steps=3,
    )
    nodes = [node for e in events.rows if e["ev"] == "graph_nodes" for node in e["nodes"]]
    created = [node for node in nodes if not node[1] and node[0] < 1000]
    assert len(created) == 3
    paths = {index: (path, kind) for index, _, path, kind in events.all("modules")}
    assert {paths[node[4]] for node in created} == {("", "Captured")}
    stacks = dict(events.all("stacks"))
    assert {stacks[node[5]][0][2].rpartition(".")[2] for node in created} == {"forward"}
    assert all(len(node) == 7 for node in nodes)
    assert len([e for e in events.rows if e["ev"] == "attribution" and e["what"] == "capture"]) == 1
    # A model that is called while a graph is captured is no step.
    assert events.told("window") == []


def test_beyond_so_many_nodes_their_module_alone_is_kept(lab: Lab) -> None:
    events = run(
        lab,
        """
        import _spikeprof.windows as windows
        windows.NODES_MAX = 10
        class Captured(torch.nn.Module):
            def forward(self, n):
                fakegpu.capture(n)
        torch.cuda._lazy_init()
        Captured()(20)
        """,
        attribute_steps=3,
    )
    nodes = [node for e in events.rows if e["ev"] == "graph_nodes" for node in e["nodes"] if not node[1]]
    assert [node[5] >= 0 for node in nodes] == [True] * 10 + [False] * 30
    assert {node[4] for node in nodes} == {0}


def test_forked_children_have_no_hooks(lab: Lab) -> None:
    events = run(
        lab,
        """
        import os
        torch.cuda._lazy_init()
        step(1)
        assert hooked()
        pid = os.fork()
        if not pid:
            from _spikeprof import marks
            assert not hooked() and marks._steps is None
            model.one.mlp.forward = lambda x: None
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        step(1)
        """,
        attribute_steps=3,
    )
    assert events.owners()["one"] >= 4
    assert events.faults == []


def test_a_fault_of_ours_ends_it_and_nothing_else(lab: Lab) -> None:
    events = run(
        lab,
        """
        import _spikeprof.frames as frames
        torch.cuda._lazy_init()
        def broken(*_, **__):
            raise RuntimeError("broken")
        broken.__module__ = "_spikeprof.frames"
        exec("def place(*_, **__):\\n    raise RuntimeError('broken')", vars(frames))
        frames.Frames.place = frames.place
        step(1)
        time.sleep(0.3)
        step(1)
        assert not hooked()
        fakegpu.capture(4)
        """,
        attribute_steps=3,
    )
    assert events.told("ended") == ["fault: RuntimeError('broken')"]
    assert len(events.faults) == 1


def test_what_a_handler_of_the_programs_raises_in_a_callback_ends_nothing(lab: Lab) -> None:
    events = run(
        lab,
        """
        import _spikeprof.frames as frames
        torch.cuda._lazy_init()
        place = frames.Frames.place
        def interrupted(*_, **__):
            frames.Frames.place = place
            raise KeyError("of a handler")
        frames.Frames.place = interrupted
        try:
            step(1)
            time.sleep(0)
        except KeyError:
            pass
        else:
            raise AssertionError("the program did not hear of it")
        time.sleep(0.3)
        assert hooked()
        step(1)
        """,
        attribute_steps=3,
    )
    assert events.told("ended") == ["the program ended"]
    assert events.faults == []
    # Without the launch that was interrupted, and the last one of the step, which the exception kept from running.
    assert events.owners() == times(2) - Counter({"one": 1, "-": 1})


def test_a_model_whose_dict_is_code_of_the_programs(lab: Lab) -> None:
    events = run(
        lab,
        """
        import sys
        torch.cuda._lazy_init()
        asked = []
        class Odd(Model):
            @property
            def __dict__(self):
                asked.append(sys._getframe(1).f_globals["__name__"])
                return vars(torch.nn.Module)["__dict__"].__get__(self)
        odd = Odd()
        for _ in range(3):
            odd(Tensor(1))
        assert asked and not [name for name in asked if "spikeprof" in name], asked
        """,
        attribute_steps=3,
    )
    assert events.faults == []
    assert events.owners() == {"one": 6, "one.mlp": 3, "two": 6, "two.mlp": 3}


# -- with the real torch ----------------------------------------------------------------------------


@pytest.fixture
def real_torch(tmp_path: Path) -> Path:
    """A folder with the launches alone: torch is the one that is installed."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed here")
    folder = tmp_path / "real"
    folder.mkdir()
    (folder / "fakegpu.py").write_bytes((FAKES / "fakegpu.py").read_bytes())
    return folder


REAL = """
    import json, os, time, torch, fakegpu
    from _spikeprof import attribution, hooks
    attribution._CLOCK_WINDOWS_MAX = 0

    class Launch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            fakegpu.launch(1)
            return x + 1

    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(8, 8)
        def forward(self, x):
            return Launch.apply(self.up(x))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Mlp() for _ in range(3))
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x
    """


def test_operators_and_guests_of_the_real_torch(lab: Lab, real_torch: Path) -> None:
    """Steps with operators; a profiler of the CPU alone in between, which must not find ours in its place; a fork."""
    program = textwrap.dedent(REAL) + textwrap.dedent("""
        hooks.the_agent().activate()
        model = Model()
        enabled = torch._C._autograd._profiler_enabled
        model(torch.ones(2, 8))
        assert enabled()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as guest:
            model(torch.ones(2, 8))
            model(torch.ones(200, 8))
        assert sum(event.name == "aten::linear" for event in guest.events()) == 6
        assert not enabled()
        model(torch.ones(2, 8))
        assert enabled()
        pid = os.fork()
        if not pid:
            os._exit(enabled())
        assert os.waitpid(pid, 0)[1] == 0
        for _ in range(3):
            model(torch.ones(2, 8))
        assert not enabled()
        """)
    events = run(lab, program, torch=real_torch, attribute_steps=4)
    assert events.faults == []
    assert events.owners() == {"layers.0": 5, "layers.1": 5, "layers.2": 5}
    ops = events.all("ops")
    assert Counter(op[0] for op in ops) == {"Launch": 9}  # not in the guest's session
    assert [op[4] for op in ops] == [[[2, 8]]] * 9
    launches = events.all("launches")
    holding = [[op for op in ops if op[1] <= launch[3] < op[2] and op[3] == launch[4]] for launch in launches]
    assert Counter(map(len, holding)) == {1: 9, 0: 6}


def test_compiled_models_compile_as_they_would(lab: Lab, real_torch: Path) -> None:
    """A model, and one layer of another: as many frames, graphs and breaks as in a process that nobody traces."""
    program = textwrap.dedent(REAL) + textwrap.dedent("""
        import torch._dynamo
        from torch._dynamo.utils import counters
        def work():
            with torch.no_grad():
                model, other = Model(), Model()
                model(torch.ones(2, 8))
                whole = torch.compile(model, backend="eager")
                other.layers[1] = torch.compile(other.layers[1], backend="eager")
                for n in (2, 2, 3, 3, 2, 2, 2):
                    whole(torch.ones(n, 8))
                    other(torch.ones(n, 8))
            return json.dumps([counters["frames"], counters["stats"], len(counters["graph_break"])])
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(write, work().encode())
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        plain = os.read(read, 10_000).decode()
        hooks.the_agent().activate()
        traced = work()
        assert traced == plain, (traced, plain)
        assert not hasattr(torch.nn.Module.__call__, "alive")
        assert torch._dynamo.callback.callback_handler.end_callbacks
        torch._dynamo.reset()
        time.sleep(0.3)
        assert torch._dynamo.callback.callback_handler.end_callbacks
        """)
    events = run(lab, program, torch=real_torch, attribute_steps=3)
    assert events.faults == []
    assert "after a compilation" in events.told("window")
    assert events.told("skipped") == ["calls of models are not followed any more: a compiler is used"]
    assert set(events.owners()) <= {"", "layers.0", "layers.1", "layers.2"}
    assert all(seen >= 3 for seen in events.owners().values())
