"""The agent's source: Python 3.9 syntax, and running under every interpreter that is here."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest
from inject.harness import Lab, check_whole

from spikeprof.profiler import inject

pytestmark = pytest.mark.timeout(60)

SOURCES = sorted(Path(inject.SITE_FOLDER).parent.rglob("*.py"))

VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]


def interpreter(version: str) -> str:
    """The path of a Python of this version. Skips where there is none."""
    found = shutil.which(f"python{version}")
    if found is None:
        pytest.skip(f"no python{version} is on the PATH")
    ask = "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])"
    run = subprocess.run([found, "-c", ask], capture_output=True, text=True, check=False)
    path, _, number = run.stdout.strip().rpartition(" ")
    if run.returncode or number != version:
        pytest.skip(f"python{version} does not run here: {run.stderr.strip().partition(chr(10))[0]}")
    return path


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_file_is_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))


def test_there_is_something_to_check() -> None:
    assert {"agent.py", "hooks.py", "sitecustomize.py", "cupti.py"} <= {path.name for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_imports_are_of_the_standard_library(path: Path) -> None:
    """sitecustomize is the user's own; everything else comes with Python or from beside."""
    import sys

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
        for name in names:
            assert name.partition(".")[0] in {*sys.stdlib_module_names, "_spikeprof", "sitecustomize"}, name


@pytest.mark.parametrize("version", VERSIONS)
def test_a_whole_run_under(lab: Lab, version: str) -> None:
    """Threads, graphs, a guest, forks, a full buffer, an exit with daemon threads about; in development mode."""
    path = lab.program("""
        import multiprocessing, os, sys, threading, time
        import torch, fakegpu
        def work(n):
            torch.cuda.launch(n)
        if __name__ == "__main__":
            pid = os.fork()
            if not pid:
                work(30)
                sys.exit(0)
            worker = multiprocessing.get_context("spawn").Process(target=work, args=(40,))
            worker.start()
            work(100)
            threads = [threading.Thread(target=work, args=(50,)) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            with torch.autograd.profiler.profile() as profile:
                work(7)
            assert profile.kernels_count == 7
            fakegpu.capture(600)
            fakegpu.launch_distinct(3000)
            worker.join()
            assert worker.exitcode == 0
            assert os.waitpid(pid, 0)[1] == 0
            time.sleep(0.2)
            def forever():
                while True:
                    time.sleep(0.001)
            for _ in range(3):
                threading.Thread(target=forever, daemon=True).start()
            work(10)
            sys.exit(5)
        """)
    run = lab.record_command([interpreter(version), "-X", "dev", "-W", "ignore::DeprecationWarning", str(path)])
    assert run.code == 5
    assert {p["python_version"].rpartition(".")[0] for p in run.processes} == {version}
    check_whole(run, 3380, launches_lost=3010)  # those after the guest
    assert {p["status"] for p in run.processes} <= {"traced", "no_cuda"}
    assert sorted(run.kernels_by_process()) == [30, 40, 3310]
    assert run.trace.table("graph_nodes").num_rows == 1200
