"""Programs of several processes: each has its own spool, and none touches another's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from inject.harness import PYTHON, TIMEOUT_S, Lab, check_whole

pytestmark = pytest.mark.timeout(60)


def test_fork_before_cuda(lab: Lab) -> None:
    run = lab.record("""
        import os, sys, torch
        children = []
        for n in (1, 2):
            pid = os.fork()
            if not pid:
                torch.cuda.launch(100 * n)
                sys.exit(0)
            children.append(pid)
        torch.cuda.launch(50)
        assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
        """)
    assert run.code == 0
    check_whole(run, 350)
    assert sorted(run.kernels_by_process()) == [50, 100, 200]
    parents = {p["pid"]: p["parent_pid"] for p in run.processes}
    assert sum(parent in parents for parent in parents.values()) == 2


def test_fork_after_cuda(lab: Lab) -> None:
    """The child cannot use CUDA; the parent goes on undisturbed, whatever the child closes, runs or leaves open."""
    run = lab.record("""
        import os, sys, time, torch
        torch.cuda.launch(100)
        quick = os.fork()
        if not quick:
            sys.exit(0)
        closing = os.fork()
        if not closing:
            os.closerange(3, 1000)
            os._exit(0)
        staying = os.fork()
        if not staying:
            time.sleep(1.5)
            os._exit(0)
        for pid in (quick, closing):
            assert os.waitpid(pid, 0)[1] == 0
        time.sleep(0.25)
        torch.cuda.launch(100)
        """)
    assert run.code == 0
    check_whole(run, 200)
    # The child that outlives its parent must not keep the parent's line to the supervisor open.
    assert run.outcome.seconds < 1.4
    assert not run.outcome.warnings


def test_fork_after_a_cuda_package_was_only_imported(lab: Lab) -> None:
    """Importing cupy does not initialise CUDA: its forked child may, and CUPTI goes on recording there."""
    run = lab.record("""
        import cupy, os, sys, time
        pids = []
        for n in (1, 2):
            pid = os.fork()
            if not pid:
                cupy.launch(100 * n)
                time.sleep(0.3)
                sys.exit(0)
            pids.append(pid)
        cupy.launch(50)
        assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
        """)
    assert run.code == 0
    check_whole(run, 350)
    assert sorted(run.kernels_by_process()) == [50, 100, 200]


def test_exec_after_cuda(lab: Lab) -> None:
    """The new program has the old one's number, its own spool, and none of the old one's descriptors."""
    after = lab.program(
        """
        import os, cupy
        assert len(os.listdir("/proc/self/fd")) <= 3 + 1 + 2, os.listdir("/proc/self/fd")
        cupy.launch(30)
        """,
        "after.py",
    )
    run = lab.record(f"""
        import cupy, os, sys, time
        cupy.launch(70)
        time.sleep(0.3)
        os.execv(sys.executable, [sys.executable, {str(after)!r}])
        """)
    assert run.code == 0
    check_whole(run, 100)
    assert sorted(run.kernels_by_process()) == [30, 70]
    assert len({p["pid"] for p in run.processes}) == 1
    assert {p["status"] for p in run.processes} == {"traced", "partial"}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(lab: Lab, method: str) -> None:
    run = lab.record(f"""
        import multiprocessing, torch
        def work(n):
            torch.cuda.launch(n)
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            workers = [context.Process(target=work, args=(n,)) for n in (10, 20)]
            for w in workers: w.start()
            for w in workers: w.join()
            assert [w.exitcode for w in workers] == [0, 0]
            torch.cuda.launch(5)
        """)
    assert run.code == 0
    check_whole(run, 35)
    assert sorted(run.kernels_by_process()) == [5, 10, 20]
    assert {p["status"] for p in run.processes} <= {"traced", "no_cuda"}


def test_concurrent_futures(lab: Lab) -> None:
    run = lab.record("""
        import concurrent.futures, multiprocessing, torch
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
                list(pool.map(torch.cuda.launch, [10] * 20))
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                list(pool.map(torch.cuda.launch, [10] * 20))
        """)
    assert run.code == 0
    check_whole(run, 400)


def test_a_launcher_of_ranks(lab: Lab) -> None:
    worker = lab.program("import os, torch; torch.cuda.launch(10 * (1 + int(os.environ['RANK'])))", "worker.py")
    run = lab.record(f"""
        import os, subprocess, sys
        children = [
            subprocess.Popen([sys.executable, {str(worker)!r}], env={{**os.environ, "RANK": str(rank)}})
            for rank in reversed(range(4))
        ]
        assert [c.wait() for c in children] == [0] * 4
        """)
    assert run.code == 0
    check_whole(run, 100)
    traced = {p["rank"]: p["command"] for p in run.processes if p["status"] == "traced"}
    assert sorted(traced) == [0, 1, 2, 3]
    assert run.kernels_by_process() == [10, 20, 30, 40]


def test_many_short_processes(lab: Lab) -> None:
    worker = lab.program("import cupy; cupy.launch(10)", "worker.py")
    run = lab.record_command(["sh", "-c", f"for i in $(seq 25); do {PYTHON} {worker} || exit 1; done"])
    assert run.code == 0
    check_whole(run, 250)
    assert len([p for p in run.processes if p["status"] == "traced"]) == 25


def test_a_process_that_outlives_the_command(lab: Lab) -> None:
    """Recorded up to the command's end, named, and left alone after it."""
    mark = lab.folder / "ended"
    daemon = lab.program(
        f"""
        import cupy, pathlib, time
        for _ in range(80):
            cupy.launch(10)
            time.sleep(0.05)
        pathlib.Path({str(mark)!r}).write_text("in peace")
        """,
        "daemon.py",
    )
    run = lab.record(f"""
        import subprocess, sys, time
        subprocess.Popen([sys.executable, {str(daemon)!r}], start_new_session=True)
        time.sleep(0.8)
        """)
    assert run.code == 0
    assert any("still running when the command ended" in warning for warning in run.outcome.warnings)
    assert run.kernels >= 100
    check_whole(run, run.kernels)
    assert ("partial", "the command ended") in [(p["status"], p["reason"]) for p in run.processes]
    for _ in range(100):
        if mark.exists():
            break
        time.sleep(0.05)
    assert mark.read_text() == "in peace"


def test_a_child_with_another_environment_is_not_followed_and_runs(lab: Lab) -> None:
    run = lab.record("""
        import cupy, subprocess, sys
        cupy.launch(10)
        test = "import sys; assert '_spikeprof' not in sys.modules"
        assert subprocess.run([sys.executable, "-c", test], env={}).returncode == 0
        """)
    assert run.code == 0
    check_whole(run, 10)


def test_descriptors_given_to_the_command_reach_the_program(lab: Lab, tmp_path: Path) -> None:
    given = os.open(tmp_path / "given", os.O_CREAT | os.O_WRONLY)
    path = lab.program(f"import os; os.write({given}, b'here')")
    with lab.start(PYTHON, path, pass_fds=(given,)) as child:
        _, err = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 0, err
    assert (tmp_path / "given").read_bytes() == b"here"
