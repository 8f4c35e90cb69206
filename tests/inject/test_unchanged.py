"""What the program sees of us: nothing that it can mistake for a change of its world."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from inject.harness import PYTHON, TIMEOUT_S, Lab, check_whole, own_lines

pytestmark = pytest.mark.timeout(60)


def both(lab: Lab, *words: str | Path, **popen: object) -> tuple[bytes, bytes]:
    """Run the words untraced and traced; exit code and standard error must be the same. Returns both outputs."""
    plain = subprocess.run([*map(str, words)], capture_output=True, timeout=TIMEOUT_S, check=False, **popen)  # type: ignore[call-overload]
    traced = subprocess.run(
        lab.command(*words),
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
        **popen,  # type: ignore[call-overload]
    )
    rest, said = own_lines(traced.stderr)
    assert (traced.returncode, rest) == (plain.returncode, plain.stderr), said
    return plain.stdout, traced.stdout


def test_output_input_and_exit_code_are_the_programs_own(lab: Lab) -> None:
    path = lab.program("""
        import cupy, os, sys
        cupy.launch(10)
        data = sys.stdin.buffer.read()
        sys.stdout.buffer.write(data[::-1] + bytes(range(256)))
        sys.stderr.write("warning: caf\\u00e9\\n")
        os.write(2, b"unended")
        sys.exit(len(data) % 256)
        """)
    plain, traced = both(lab, PYTHON, path, input=b"some\x00thing" * 1000)
    assert plain == traced
    assert plain.startswith(b"gniht\x00emos")
    assert lab.opened().table("kernels").num_rows == 10


def test_development_mode_and_warnings_as_errors_find_nothing(lab: Lab) -> None:
    """No unclosed socket or file, no deprecated call, no comparison of bytes with text."""
    path = lab.program("""
        import gc, cupy, os, warnings
        cupy.launch(10)
        pid = os.fork()
        if not pid:
            gc.collect()
            raise SystemExit
        os.waitpid(pid, 0)
        gc.collect()
        """)
    plain, traced = both(lab, PYTHON, "-X", "dev", "-bb", "-W", "error", path)
    assert plain == traced


@pytest.mark.parametrize("fault", ["import not_there_at_all", "1 / 0", "raise SystemExit(4)", "1 +"])
def test_a_cuda_package_that_fails_to_import_fails_in_the_same_words(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    package = tmp_path / "broken" / "cupy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(fault)
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{os.environ['PYTHONPATH']}")
    plain, traced = both(lab, PYTHON, lab.program("import cupy"))
    assert plain == traced


def test_sys_path_and_the_users_pythonpath(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'one'}:{os.environ['PYTHONPATH']}:relative")
    path = lab.program("""
        import cupy, subprocess, sys
        print(sys.path, flush=True)
        subprocess.run([sys.executable, "-c", "import sys; print(sys.path)"], check=True)
        """)
    plain, traced = both(lab, PYTHON, path, cwd=tmp_path)
    assert plain == traced
    assert str(tmp_path / "one").encode() in plain


def test_without_a_pythonpath(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    plain, traced = both(lab, PYTHON, "-c", "import sys; print(sys.path)")
    assert plain == traced


def test_modules_before_cuda_are_the_programs_own(lab: Lab) -> None:
    show = "import sys; print(*sorted(sys.modules), sep='\\n')"
    plain, traced = both(lab, PYTHON, "-c", show)
    more = set(traced.split()) - set(plain.split())
    assert more - {b"atexit"} == {b"_spikeprof", b"_spikeprof.hooks", b"_spikeprof.events"}
    assert set(plain.split()) <= set(traced.split())


def test_modules_after_cuda_are_the_standard_librarys(lab: Lab) -> None:
    show = lab.program("import cupy, sys; print(*sorted(sys.modules), sep='\\n')")
    plain, traced = both(lab, PYTHON, show)
    more = {name.partition(".")[0] for name in (set(traced.decode().split()) - set(plain.decode().split()))}
    assert more - {"_spikeprof"} <= sys.stdlib_module_names
    assert "threading" not in more


def test_threads_and_descriptors_are_not_seen_by_the_program(lab: Lab) -> None:
    run = lab.record("""
        import os, sys, threading
        before = sorted(os.listdir("/proc/self/fd"))
        free = os.open("/dev/null", os.O_RDONLY)
        os.close(free)
        assert len(before) <= 4, before
        import cupy
        cupy.launch(10)
        assert threading.active_count() == 1 and threading.enumerate() == [threading.main_thread()]
        # One line to the supervisor; the spool file is open from the first flush on.
        assert len(os.listdir("/proc/self/fd")) <= len(before) + 2
        """)
    assert run.code == 0


def test_the_users_sitecustomize_runs(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nsys.mark = 'mine'\nprint('site', __file__, __name__)\n")
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ['PYTHONPATH']}")
    text = "import cupy, sys, sitecustomize; cupy.launch(5); print(sys.mark, sitecustomize.__file__)"
    plain = subprocess.run([PYTHON, lab.program(text)], capture_output=True, text=True, check=True)
    check_whole(lab.record(text), 5)
    assert capfd.readouterr().out == plain.stdout
    assert plain.stdout.splitlines()[1].startswith("mine ")


@pytest.mark.parametrize("text", ["raise RuntimeError('broken')", "import not_there_at_all", "1 +"])
def test_a_broken_sitecustomize_breaks_in_the_same_words(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ['PYTHONPATH']}")
    program = "import sys, cupy; cupy.launch(5); print('sitecustomize' in sys.modules)"
    plain = subprocess.run([PYTHON, lab.program(program)], capture_output=True, text=True, check=True)
    check_whole(lab.record(program), 5)
    assert capfd.readouterr() == (plain.stdout, plain.stderr)
    assert plain.stdout == "False\n"
    assert "Error in sitecustomize" in plain.stderr


def test_without_a_sitecustomize_none_is_found(lab: Lab) -> None:
    text = (
        "import importlib.util, sys; print('sitecustomize' in sys.modules, importlib.util.find_spec('sitecustomize'))"
    )
    plain, traced = both(lab, PYTHON, "-c", text)
    assert plain == traced


@pytest.mark.parametrize("flag", ["-S", "-I", "-E", "-sE"])
def test_an_interpreter_that_looks_away_is_not_traced_and_runs(lab: Lab, flag: str) -> None:
    with lab.start(PYTHON, flag, "-c", "print('ran')") as child:
        out, err = child.communicate(timeout=TIMEOUT_S)
    assert (child.returncode, out) == (0, b"ran\n")
    rest, said = own_lines(err)
    assert rest == b""
    assert said[:-1] == [
        f"spikeprof: not traced: python -{flag[-1]} ignores PYTHONPATH or sitecustomize, "
        "through which the agent is started; the program ran and exited with 0"
    ]


def test_a_program_that_is_not_python_is_not_traced_and_runs(lab: Lab) -> None:
    with lab.start("sh", "-c", "cat; exit 3", stdin=subprocess.PIPE) as child:
        out, err = child.communicate(b"through", timeout=TIMEOUT_S)
    assert (child.returncode, out) == (3, b"through")
    assert own_lines(err)[1][:-1] == [
        "spikeprof: not traced: sh is not a Python program; only Python processes are traced; "
        "the program ran and exited with 3"
    ]


def test_the_environment_is_as_given_but_for_our_entries(lab: Lab) -> None:
    plain, traced = both(lab, PYTHON, "-c", "import os; print(*sorted(os.environ.items()), sep='\\n')")
    ours, theirs = set(traced.splitlines()), set(plain.splitlines())
    names = {line.split(b"'")[1] for line in ours ^ theirs}
    assert names == {b"PYTHONPATH", b"SPIKEPROF_SPOOL", b"SPIKEPROF_CONTROL", b"SPIKEPROF_OPTIONS"}


def test_a_loader_is_the_programs_own_again_after_the_import(lab: Lab) -> None:
    run = lab.record("""
        import cupy, importlib
        assert "exec_module" not in vars(cupy.__spec__.loader)
        assert cupy.__spec__.loader is cupy.__loader__
        assert importlib.reload(cupy) is cupy
        cupy.launch(5)
        """)
    assert run.code == 0
    check_whole(run, 5)


def test_modules_replaced_before_cuda_do_not_reach_our_thread(lab: Lab) -> None:
    """As gevent does it: threads, locks, sockets, sleep and select replaced by something cooperative."""
    run = lab.record("""
        import _thread, select, socket, threading, time
        real_sleep = time.sleep
        def refuse(*args, **kwargs):
            raise RuntimeError("replaced")
        for module, names in (
            (_thread, ("start_new_thread", "start_joinable_thread")),
            (threading, ("Thread", "Lock", "RLock", "Event", "_start_new_thread", "_allocate_lock")),
            (select, ("select", "poll")), (socket, ("socket", "create_connection")), (time, ("sleep",)),
        ):
            for name in filter(vars(module).__contains__, names):
                setattr(module, name, refuse)
        import cupy
        cupy.launch(100)
        real_sleep(0.3)
        cupy.launch(100)
        """)
    assert run.code == 0
    check_whole(run, 200)
    assert run.processes[0]["status"] == "traced", run.processes


def test_words_that_are_not_utf8(lab: Lab) -> None:
    run = lab.record("import cupy; cupy.launch(3)", os.fsdecode(b"caf\xe9"), 'quote " and \\ and \n end', "日本")
    assert run.code == 0
    check_whole(run, 3)
    assert '"' in run.processes[0]["command"]
    assert "日本" in run.processes[0]["command"]


def test_a_process_without_cuda_costs_little(lab: Lab) -> None:
    """Our part of a start: a few milliseconds, measured where it happens."""
    import re

    from spikeprof.profiler import inject

    env = {**os.environ, "PYTHONPATH": inject.SITE_FOLDER, inject.ENV_SPOOL: str(lab.folder), inject.ENV_OPTIONS: "{}"}
    best = 1e9
    for _ in range(5):
        run = subprocess.run(
            [PYTHON, "-X", "importtime", "-c", "pass"], env=env, capture_output=True, text=True, check=True
        )
        found = re.search(r"\|\s+(\d+) \|\s+sitecustomize$", run.stderr, re.MULTILINE)
        if found is None:  # it fails to be found at the end: its parts are listed one by one
            parts = re.findall(r"\|\s+(\d+) \|\s+_spikeprof\.hooks$", run.stderr, re.MULTILINE)
            assert parts, run.stderr
            best = min(best, float(parts[0]))
        else:
            best = min(best, float(found[1]))
    assert best < 10_000


def test_where_standard_streams_are_closed_they_stay_closed(lab: Lab) -> None:
    """A program that writes to its closed output must get an error, not write into our files."""
    path = lab.program("""
        import cupy, os, sys, time
        cupy.launch(10)
        time.sleep(0.3)  # the records have been written
        for number in (0, 1):
            try:
                os.write(number, b"not for your files")
            except OSError:
                continue
            sys.exit(f"{number} is {os.readlink('/proc/self/fd/%d' % number)}")
        cupy.launch(10)
        """)
    run = lab.record_command(["sh", "-c", f"exec {PYTHON} {path} <&- >&-"])
    assert run.code == 0
    check_whole(run, 20)


def test_clocks_that_the_program_stops_or_turns_are_not_ours(lab: Lab) -> None:
    """As freezegun does it: in the module and wherever else a module holds them."""
    run = lab.record("""
        import sys, time
        real = {name: getattr(time, name) for name in ("time", "time_ns", "monotonic", "perf_counter_ns")}
        def stop(name):
            for module in list(sys.modules.values()):
                for own, value in list(vars(module).items()):
                    if value is real[name]:
                        setattr(module, own, lambda: 0)
        for name in real:
            stop(name)
        assert time.time() == time.time_ns() == 0
        import cupy
        cupy.launch(100)
        time.sleep(0.3)
        cupy.launch(100)
        """)
    assert run.code == 0
    check_whole(run, 200)
    assert run.processes[0]["status"] == "traced", run.processes
    assert [state for state, _ in run.windows()] == ["traced"]
