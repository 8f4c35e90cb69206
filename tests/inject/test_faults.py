"""Whatever breaks, the program runs on and ends as it would have; what was recorded before stays readable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inject.harness import PYTHON, TIMEOUT_S, Lab, check_whole, own_lines

from spikeprof.profiler.importers import open_trace
from spikeprof.profiler.inject.events import Events

pytestmark = pytest.mark.timeout(60)


def test_a_libcupti_that_is_not_there(lab: Lab) -> None:
    run = lab.record("import cupy; cupy.launch(10); raise SystemExit(3)", libcupti="/nonexistent/libcupti.so")
    assert run.code == 3
    assert "kernels" not in run.trace or run.kernels == 0
    (process,) = run.processes
    assert process["status"] == "not_traced"
    assert "/nonexistent/libcupti.so" in process["reason"]
    note = run.trace.manifest.collectors["activity"]
    assert note.state in {"degraded", "refused"}
    assert "no libcupti" in note.reason


def test_no_libcupti_anywhere(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    # The program's library has the name by which a loaded libcupti is known: give it another.
    other = lab.folder / "libgpu.so"
    other.write_bytes(lab.library.read_bytes())
    monkeypatch.setenv("FAKE_CUPTI", str(other))
    run = lab.record(
        """
        from _spikeprof import cupti  # this machine may well have one where it is looked for
        cupti.library_candidates = lambda: iter(["libcupti.so.none"])
        import cupy
        cupy.launch(10)
        """,
        libcupti="",
    )
    assert run.code == 0
    assert "no libcupti found (libcupti.so.none: cannot open" in run.processes[0]["reason"]


def test_a_loaded_libcupti_is_taken_before_any_other(lab: Lab) -> None:
    check_whole(lab.record("import cupy; cupy.launch(10)", libcupti=""), 10)


def test_what_is_said_when_nothing_could_be_recorded(lab: Lab) -> None:
    path = lab.program("import cupy; cupy.launch(10); raise SystemExit(3)")
    with lab.start(PYTHON, path, options=("--libcupti", "/nonexistent.so")) as child:
        _, err = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 3
    line, where = own_lines(err)[1]
    assert line.startswith("spikeprof: not traced: activate: no libcupti found (/nonexistent.so: ")
    assert line.endswith("; the program ran and exited with 3")
    assert where.startswith("spikeprof: a trace without GPU work is in ")


@pytest.mark.parametrize("call", ["register", "enable"])
def test_a_libcupti_that_refuses_to_record(lab: Lab, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setenv("FAKE_CUPTI_FAIL", call)
    run = lab.record("import cupy; cupy.launch(10); raise SystemExit(3)")
    assert run.code == 3
    assert run.kernels == 0
    assert run.processes[0]["status"] in {"not_traced", "partial"}
    assert "CUPTI_ERROR_UNKNOWN (999)" in run.processes[0]["reason"]


def test_a_subscription_that_another_holds(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUPTI_FAIL", "subscribe")
    run = lab.record("import cupy; cupy.launch(10); cupy.capture(5)")
    check_whole(run, 10)
    assert any("graph nodes refused" in note and "(39)" in note for note in run.trace.manifest.notes)


def test_a_flush_that_fails_ends_recording(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUPTI_FAIL", "flush")
    run = lab.record("import cupy, time; cupy.launch(10); time.sleep(0.3); raise SystemExit(3)")
    assert run.code == 3
    assert run.processes[0]["status"] in {"not_traced", "partial"}
    assert "cuptiActivityFlushAll" in run.processes[0]["reason"]


def test_a_flush_that_fails_still_makes_way_for_a_guest(lab: Lab) -> None:
    run = lab.record("""
        import ctypes, os, time, torch
        torch.cuda.launch(10)
        time.sleep(0.25)
        setenv = ctypes.CDLL(None).setenv
        setenv(b"FAKE_CUPTI_FAIL", b"flush", 1)
        profile = torch.autograd.profiler.profile()
        profile.__enter__()
        setenv(b"FAKE_CUPTI_FAIL", b"", 1)
        torch.cuda.launch(30)
        profile.__exit__()
        assert profile.kernels_count == 30, profile.kernels_count
        torch.cuda.launch(30)
        """)
    assert run.code == 0
    check_whole(run, 10)
    assert run.windows()[-1][0] == "stopped"


def test_a_flush_that_never_returns_does_not_hang_the_program(lab: Lab) -> None:
    """From some moment on; the agent's thread is in it then, and the end waits its two seconds for it."""
    run = lab.record("""
        import ctypes, cupy, os, time
        cupy.launch(10)
        time.sleep(0.3)
        ctypes.CDLL(None).setenv(b"FAKE_CUPTI_FAIL", b"hang", 1)
        time.sleep(0.3)
        raise SystemExit(3)
        """)
    assert run.code == 3
    check_whole(run, 10)
    assert run.outcome.seconds < 8


def test_a_supervisor_that_is_gone_before_cuda_comes(lab: Lab) -> None:
    run = lab.record("""
        import os
        os.unlink(os.environ["SPIKEPROF_CONTROL"])
        import cupy
        cupy.launch(50)
        """)
    assert run.code == 0
    assert run.kernels == 0
    assert run.windows()[-1] == ("stopped", "the supervisor is gone")
    assert run.processes[0]["reason"] == "the supervisor is gone"


def test_a_supervisor_that_takes_no_calls(lab: Lab) -> None:
    """Recorded, but kernels are shown by address."""
    run = lab.record("""
        import _socket, os, time
        def busy(*_):
            raise BlockingIOError(11, "busy")
        class Socket(_socket.socket):
            connect = busy
        _socket.socket = Socket
        import cupy
        cupy.launch(30)
        time.sleep(0.3)
        cupy.launch(20)
        """)
    assert run.code == 0
    assert run.kernels == 50
    names = run.trace.table("kernels").column("name").cast("string").unique().to_pylist()
    assert all("name not read" in name for name in names)
    assert any("no line to the supervisor" in note for note in run.trace.manifest.notes)


def test_name_pointers_into_nothing(lab: Lab) -> None:
    """Unmapped, misaligned, huge, the last byte of a page, binary, unended: none may crash the program."""
    run = lab.record("""
        import ctypes, cupy, mmap, time
        page = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        binary = ctypes.create_string_buffer(b"\\x01\\xff\\x07binary")
        unended = mmap.mmap(-1, 64 * mmap.PAGESIZE)
        unended.write(b"A" * len(unended))
        utf8 = ctypes.create_string_buffer("größe_kernel".encode())
        for pointer in (
            1, 8, 0xdead_beef, (1 << 47) - 1, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
            at + mmap.PAGESIZE - 1, ctypes.addressof(binary),
            ctypes.addressof(ctypes.c_char.from_buffer(unended)), ctypes.addressof(utf8),
        ):
            cupy.launch_at(1, pointer)
        time.sleep(0.3)
        cupy.launch(3)
        """)
    assert run.code == 0
    names = run.trace.table("kernels").column("name").cast("string").to_pylist()
    assert len(names) == 15
    assert sum("name not read" in name for name in names) == 11
    assert "größe_kernel" in names
    assert sum(name.startswith("fake_gemm") for name in names) == 3


def test_a_storm_of_names(lab: Lab) -> None:
    run = lab.record("import cupy; cupy.launch_distinct(5000)")
    check_whole(run, 5000)
    assert len(run.trace.table("kernels").column("name").cast("string").unique()) == 5000


def test_a_storm_of_names_in_a_program_that_never_lets_go(lab: Lab) -> None:
    run = lab.record("""
        import cupy, time
        cupy.launch_distinct(5000)
        end = time.time() + 1
        while time.time() < end:
            sum(range(100_000))
        cupy.launch_distinct(6000)
        """)
    check_whole(run, 11000)


def test_buffers_that_run_out_drop_records_and_are_counted(lab: Lab) -> None:
    """A spool that is never written to disk fast enough: here, buffers that are never given back."""
    run = lab.record("""
        import cupy
        from _spikeprof import hooks, spool
        hooks.the_agent().spool.lend = lambda: 0
        cupy.launch(10)
        """)
    assert run.code == 0
    assert run.kernels == 0
    assert run.trace.manifest.collectors["activity"].dropped_count == 20


def test_a_disk_that_is_full(lab: Lab) -> None:
    """A real small file system; skipped where mounting is not allowed."""
    disk = lab.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        path = lab.program("""
            import cupy, time
            for _ in range(10):
                cupy.launch(2000)
                time.sleep(0.12)
            cupy.launch(20_000)
            time.sleep(0.3)
            print("ran to its end", flush=True)
            raise SystemExit(3)
            """)
        with lab.start(PYTHON, path, options=("-o", str(disk / "trace"))) as child:
            out, err = child.communicate(timeout=TIMEOUT_S)
        assert (child.returncode, out) == (3, b"ran to its end\n")
        rest, said = own_lines(err)
        assert rest == b""
        assert any("disk" in line or "space" in line.lower() for line in said), said
        # The spool is still there; with room, it can be read.
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        trace = open_trace(disk / "trace")
        assert trace.table("kernels").num_rows >= 15_000
        assert (
            trace.table("processes").to_pylist()[0]["reason"].startswith("the trace could not be written (disk full)")
        )
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


def test_a_line_for_which_there_is_no_room_keeps_no_other_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    room = [100]

    def write(self: Events, lines: list[str]) -> bool:
        if sum(map(len, lines)) > room[0]:
            return False
        written.extend(lines)
        return True

    monkeypatch.setattr(Events, "_write", write)
    events = Events(str(tmp_path))
    events.event(ev="launches", t=1, launches=["x" * 200])
    events.event(ev="window", t=2)
    assert written == ['{"ev":"window","t":2}']
    room[0] = 1000
    events.event(ev="finished", t=3)
    assert [line[:14] for line in written] == ['{"ev":"window"', '{"ev":"launche', '{"ev":"finishe']


def test_a_limit_on_file_size(lab: Lab) -> None:
    """Set by the program for itself: what we write beyond it fails, and must not be its end."""
    run = lab.record("""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        import cupy, time
        cupy.launch(1000)
        time.sleep(0.3)
        cupy.launch(20_000)
        time.sleep(0.3)
        raise SystemExit(3)
        """)
    assert run.code == 3
    assert run.kernels >= 1000
    assert run.processes[0]["status"] == "partial"
    assert run.processes[0]["reason"] == "the trace could not be written (File too large)"
    assert ("stopped", "the trace could not be written (File too large)") in run.windows()


def test_a_spool_that_cannot_be_written(lab: Lab) -> None:
    """Its folder becomes a file, which stops root, too."""
    run = lab.record("""
        import os
        spool = os.environ["SPIKEPROF_SPOOL"]
        os.rename(spool, spool + ".away")
        open(spool, "w").close()
        import cupy, time
        cupy.launch(1000)
        time.sleep(0.3)
        os.unlink(spool)
        os.rename(spool + ".away", spool)
        raise SystemExit(3)
        """)
    assert run.code == 3
    assert run.kernels == 0
    assert run.processes[0]["reason"] == "the trace could not be written (Not a directory)"


def test_a_spool_whose_file_is_removed(lab: Lab) -> None:
    run = lab.record("""
        import cupy, glob, os, time
        cupy.launch(1000)
        time.sleep(0.3)
        for path in glob.glob(os.environ["SPIKEPROF_SPOOL"] + "/*.act"):
            os.unlink(path)
        os.closerange(3, 256)
        cupy.launch(1000)
        time.sleep(0.3)
        raise SystemExit(3)
        """)
    assert run.code == 3
    assert "could not be written" in run.processes[0]["reason"]


def test_a_program_that_closes_all_descriptors(lab: Lab) -> None:
    """As daemons do; its own files then get our numbers, and must not get our bytes."""
    own = lab.folder / "own"
    run = lab.record(f"""
        import cupy, os, time
        cupy.launch(100)
        time.sleep(0.3)
        os.closerange(3, 4096)
        files = [os.open({str(own)!r} + str(n), os.O_CREAT | os.O_RDWR) for n in range(20)]
        cupy.launch_distinct(200)
        time.sleep(0.3)
        cupy.launch_distinct(300)
        time.sleep(0.3)
        for file in files:
            assert os.fstat(file).st_size == 0
            os.write(file, b"mine")
        cupy.launch(10)
        """)
    assert run.code == 0
    check_whole(run, 610)
    assert {path.read_bytes() for path in lab.folder.glob("own*")} == {b"mine"}
    assert run.processes[0]["status"] == "traced"


def test_sockets_of_the_program_under_our_number_are_not_read(lab: Lab) -> None:
    run = lab.record("""
        import cupy, os, socket, time
        cupy.launch(10)
        time.sleep(0.15)
        os.closerange(3, 4096)
        pairs = [socket.socketpair() for _ in range(10)]
        for one, other in pairs:
            one.sendall(b"for the program")
            other.sendall(b"for the program")
        time.sleep(0.4)
        for pair in pairs:
            for end in pair:
                end.settimeout(2)
                assert end.recv(100) == b"for the program"
        cupy.launch(10)
        """)
    assert run.code == 0
    check_whole(run, 20)


def test_a_program_that_changes_its_folder(lab: Lab) -> None:
    run = lab.record("""
        import cupy, os, time
        os.chdir("/")
        cupy.launch(10)
        time.sleep(0.3)
        cupy.launch(10)
        """)
    check_whole(run, 20)


def test_sigpipe_with_its_deadly_default(lab: Lab) -> None:
    """The supervisor dies; writing to it then must not kill the program."""
    path = lab.program("""
        import cupy, os, signal, sys, time
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        cupy.launch(100)
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGKILL)
        cupy.launch(100)
        open("ended", "w").write("in peace")
        """)
    with lab.start(PYTHON, path, cwd=lab.folder) as child:
        child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == -9
    for _ in range(100):
        if (lab.folder / "ended").exists():
            break
        time.sleep(0.05)
    assert (lab.folder / "ended").read_text() == "in peace"


def test_a_supervisor_that_is_killed(lab: Lab) -> None:
    """The program goes on at once and stops recording; what was recorded is recovered from the folder."""
    path = lab.program("""
        import cupy, os, time
        cupy.launch(1000)
        print(os.getpid(), flush=True)
        for n in range(40):
            began = time.perf_counter()
            cupy.launch(10)
            if time.perf_counter() - began > 1:
                raise SystemExit("held up")
            time.sleep(0.05)
        open("ended", "w").write("in peace")
        """)
    child = lab.start(PYTHON, path, cwd=lab.folder)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.5)
        child.kill()
        child.wait()
        killed = time.time_ns()
        child.stdout.read()
    for _ in range(100):
        if (lab.folder / "ended").exists():
            break
        time.sleep(0.05)
    assert (lab.folder / "ended").read_text() == "in peace"
    analysed = subprocess.run(
        [Path(sys.executable).with_name("spikeprof"), "analyze", lab.folder / "trace"],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert analysed.returncode == 0, analysed.stderr
    assert "fake_gemm" in analysed.stdout
    trace = open_trace(lab.folder / "trace")
    assert trace.table("kernels").num_rows >= 1050
    assert int(trace.column("kernels", "end_ns").max()) + trace.manifest.t0_unix_ns < killed + 500_000_000
    assert ("stopped", "the supervisor is gone") in [
        (w["state"], w["reason"]) for w in trace.table("windows").to_pylist()
    ]


def test_a_supervisor_that_answers_nothing(lab: Lab) -> None:
    """Suspended, say: the program's end waits two seconds for it and no longer."""
    path = lab.program("""
        import cupy, os, signal, time
        cupy.launch(100)
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGSTOP)
        open("began", "w").write(str(time.time()))
        """)
    with lab.start(PYTHON, path, cwd=lab.folder) as child:
        for _ in range(200):
            if (lab.folder / "began").exists():
                break
            time.sleep(0.02)
        waiting = time.monotonic()
        target = _child_of(child.pid)
        while target and _alive(target) and time.monotonic() - waiting < 10:
            time.sleep(0.05)
        took = time.monotonic() - waiting
        os.kill(child.pid, signal.SIGCONT)
        child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 0
    assert took < 4


def _child_of(pid: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                return int(entry.name)
    return 0


def _alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_foreign_words_on_the_control_socket_harm_nobody(lab: Lab) -> None:
    run = lab.record("""
        import os, socket, time
        import cupy
        for words in (
            b"\\xff\\xfe\\n", b"[1, 2]\\n", b'{"spool": 3, "pid": "x"}\\n', b'{"spool": "a\\\\u0000"}\\n',
            b'{"bye": true}\\n', b'{"spool": "../../x"}\\n{"bye": 1}\\n',
        ):
            line = socket.socket(socket.AF_UNIX)
            line.connect(os.environ["SPIKEPROF_CONTROL"])
            line.sendall(words)
            line.close()
        cupy.launch(10)
        time.sleep(0.3)
        cupy.launch(10)
        """)
    check_whole(run, 20)


def test_options_that_cannot_be_read(lab: Lab) -> None:
    """The agent cannot be made: the hook says so and the program runs."""
    run = lab.record("""
        import os
        os.environ["SPIKEPROF_OPTIONS"] = "not json"
        import cupy
        cupy.launch(10)
        """)
    assert run.code == 0
    assert "kernels" not in run.trace
    assert run.processes[0]["status"] == "not_traced"
    assert run.processes[0]["reason"].startswith("hook for cupy: JSONDecodeError")
