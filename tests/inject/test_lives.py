"""How a process may begin and end: nothing is lost that had time to be written, and nothing hangs."""

from __future__ import annotations

import importlib.util
import os
import pty
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from inject.harness import PYTHON, TIMEOUT_S, Lab, check_whole, own_lines

from spikeprof.profiler import launch

pytestmark = pytest.mark.timeout(60)

#: What a killed process may lose.
LOSS_NS = 200_000_000


def test_a_plain_program(lab: Lab) -> None:
    run = lab.record("import cupy; cupy.launch(1000)")
    assert run.code == 0
    check_whole(run, 1000)
    assert run.processes[0]["status"] == "traced"
    assert [state for state, _ in run.windows()] == ["traced"]


def test_torch_is_followed_from_its_lazy_initialisation(lab: Lab) -> None:
    run = lab.record("import torch; torch.cuda.launch(50)")
    check_whole(run, 50)
    assert run.trace.manifest.versions["torch"] == "0.0+fake"


def test_importing_the_real_torch_activates_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recent ones import cuda-bindings for themselves."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed here")
    monkeypatch.delenv("PYTHONPATH")
    path = lab.program("""
        import torch
        from _spikeprof import hooks
        assert hooks._agent is not None and not hooks._agent.activated
        names = [getattr(call[0], "__qualname__", "") for call in torch.cuda._queued_calls]
        assert names.count("Agent.activate") == 1, names
        """)
    run = lab.record_command([sys.executable, str(path)])
    assert run.code == 0
    assert [p["status"] for p in run.processes] == ["no_cuda"]


def test_cuda_bindings_without_torch_are_followed(lab: Lab) -> None:
    check_whole(lab.record("import cuda.bindings.driver, fakegpu; fakegpu.launch(10)"), 10)


#: A driver that is initialised, with two GPUs. The second one's primary context, or one of the thread, may be there.
DRIVER = """
#include <stdlib.h>
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{ *flags = 0; *active = device == 1 && getenv("FAKE_PRIMARY"); return 0; }
int cuCtxGetCurrent(void **context) { *context = getenv("FAKE_CURRENT") ? context : 0; return 0; }
"""


@pytest.mark.parametrize("context", ["FAKE_PRIMARY", "FAKE_CURRENT", ""])
def test_cuda_used_past_torch_is_not_called_no_use(lab: Lab, monkeypatch: pytest.MonkeyPatch, context: str) -> None:
    """And to ask whether there is a GPU, which initialises the driver, is no use."""
    source, library = lab.folder / "cuda.c", lab.folder / "libcuda.so.1"
    source.write_text(DRIVER)
    build = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(build, check=True)
    monkeypatch.setenv("FAKE_LIBCUDA", str(library))
    if context:
        monkeypatch.setenv(context, "1")
    run = lab.record("import torch, cuda.bindings.driver as driver; driver.cuInit(0)")
    assert run.code == 0
    (process,) = run.processes
    if context:
        assert process["status"] == "not_traced"
        assert "not by torch" in process["reason"]
    else:
        assert process["status"] == "no_cuda"
    run = lab.record("import torch, cuda.bindings.driver", output=lab.folder / "unused")
    assert [p["status"] for p in run.processes] == ["no_cuda"]


def test_a_program_that_never_uses_cuda(lab: Lab) -> None:
    run = lab.record("import torch")
    assert run.code == 0
    assert "kernels" not in run.trace
    assert [p["status"] for p in run.processes] == ["no_cuda"]
    assert run.outcome.reason == "no process used CUDA"


@pytest.mark.parametrize(
    ("ending", "code", "finished"),
    [
        ("sys.exit(7)", 7, True),
        ("sys.exit('a word')", 1, True),
        ("raise ValueError('oh')", 1, True),
        ("time.sleep(0.3); os._exit(9)", 9, False),
        ("time.sleep(0.3); os.kill(os.getpid(), signal.SIGTERM)", 128 + 15, False),
        ("time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, False),
        ("time.sleep(0.3); os.abort()", 128 + 6, False),
    ],
)
def test_endings(lab: Lab, capfd: pytest.CaptureFixture[str], ending: str, code: int, finished: bool) -> None:
    run = lab.record(f"import cupy, os, signal, sys, time\ncupy.launch(500)\n{ending}")
    assert run.code == code
    check_whole(run, 500)
    assert run.processes[0]["status"] == ("traced" if finished else "partial")


def test_a_handler_of_sigterm_that_exits(lab: Lab) -> None:
    run = lab.record("""
        import cupy, os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        cupy.launch(500)
        os.kill(os.getpid(), signal.SIGTERM)
        """)
    assert run.code == 5
    check_whole(run, 500)


def test_sigkill_loses_no_more_than_a_fifth_of_a_second(lab: Lab) -> None:
    mark = lab.folder / "killed"
    for attempt in range(3):  # a busy machine may delay any thread: one good run shows how it works
        run = lab.record(
            f"""
            import cupy, os, signal, time
            cupy.generate(1000)
            time.sleep(0.6)
            open({str(mark)!r}, "w").write(str(time.time_ns()))
            os.kill(os.getpid(), signal.SIGKILL)
            """,
            output=lab.folder / f"trace{attempt}",
        )
        assert run.code == 128 + 9
        last = run.trace.manifest.t0_unix_ns + int(run.trace.column("kernels", "end_ns").max())
        lost = int(mark.read_text()) - last
        if lost <= LOSS_NS:
            break
    assert lost <= LOSS_NS
    assert run.processes[0]["status"] == "partial"
    assert "last 0.2 s" in run.processes[0]["reason"]


def test_threads_launch_at_once(lab: Lab) -> None:
    run = lab.record("""
        import cupy, threading
        threads = [threading.Thread(target=cupy.launch, args=(2000,)) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """)
    check_whole(run, 16000)


def test_the_end_is_not_held_up_by_daemon_threads(lab: Lab) -> None:
    run = lab.record("""
        import cupy, threading
        def forever():
            while True:
                cupy.launch(1)
        for _ in range(4):
            threading.Thread(target=forever, daemon=True).start()
        cupy.launch(1000)
        """)
    assert run.code == 0
    assert run.kernels >= 1000


def test_work_in_the_programs_own_exit_handlers_is_recorded(lab: Lab) -> None:
    run = lab.record("""
        import atexit
        atexit.register(lambda: cupy.launch(10))
        import cupy
        cupy.launch(5)
        """)
    check_whole(run, 15)


def test_a_full_buffer_is_delivered_by_cuptis_thread(lab: Lab) -> None:
    # 60,000 launches are 15 MB of records: four buffers of 4 MiB.
    run = lab.record("import cupy; cupy.launch(60_000)")
    check_whole(run, 60_000)


def test_the_end_takes_a_few_milliseconds(lab: Lab) -> None:
    """From the program's last handler to the end of its process: farewell and last names included."""
    program = """
        import atexit, os, time
        atexit.register(lambda: print(time.time_ns(), flush=True))
        import cupy
        cupy.launch(1000)
        """
    path = lab.program(program)
    spent = []
    for n in range(3):
        with lab.start("sh", "-c", f"{PYTHON} {path}; date +%s%N", options=("-o", str(lab.folder / f"t{n}"))) as child:
            out, _ = child.communicate(timeout=TIMEOUT_S)
        begin, end = map(int, out.split())
        spent.append((end - begin) / 1e6)
    assert min(spent) < 50, spent


def test_recording_ends_with_the_interpreter(lab: Lab) -> None:
    """Whatever runs after our handler, CUPTI's thread included, finds recording off and the interpreter unharmed."""
    run = lab.record("""
        import cupy
        class Late:
            def __del__(self, launch=cupy.launch):
                launch(100_000)
        late = Late()
        late.itself = late
        cupy.launch(10)
        """)
    assert run.code == 0
    check_whole(run, 10)


#: Counts its interrupts, and ends with that number a moment after the first.
COUNTS_INTERRUPTS = """
    import cupy, signal, sys, time
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    cupy.launch(100)
    print("ready", flush=True)
    end = time.time() + 20
    while not seen and time.time() < end:
        time.sleep(0.01)
    time.sleep(0.3)
    cupy.launch(11)
    sys.exit(len(seen))
    """


def test_ctrl_c_reaches_the_program_once(lab: Lab) -> None:
    """In a terminal, as a person types it."""
    path = lab.program(COUNTS_INTERRUPTS)
    pid, terminal = pty.fork()
    if not pid:
        command = lab.command(PYTHON, path)
        os.execv(command[0], command)
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    try:
        while chunk := os.read(terminal, 1024):
            shown += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1, shown
    os.close(terminal)
    assert lab.opened().table("kernels").num_rows == 111


def test_an_interrupt_to_the_command_alone_is_passed_on(lab: Lab) -> None:
    """As a script does it with a server that it has started, no terminal about."""
    path = lab.program(COUNTS_INTERRUPTS)
    with lab.start(PYTHON, path, start_new_session=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 1, err
    assert lab.opened().table("kernels").num_rows == 111


def test_an_interrupt_to_the_group_reaches_the_program(lab: Lab) -> None:
    """It may come twice there: the command cannot tell to whom else it was sent."""
    path = lab.program(COUNTS_INTERRUPTS)
    with lab.start(PYTHON, path, start_new_session=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode in {1, 2}, err
    assert lab.opened().table("kernels").num_rows == 111


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signals_to_the_command_are_passed_on(lab: Lab, number: signal.Signals) -> None:
    path = lab.program(f"""
        import cupy, signal, sys, time
        signal.signal({int(number)}, lambda *_: sys.exit(4))
        cupy.launch(100)
        print("ready", flush=True)
        time.sleep(20)
        """)
    with lab.start(PYTHON, path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(number)
        _, err = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 4, err
    assert lab.opened().table("kernels").num_rows == 100


def test_under_nohup_a_hangup_is_ignored_by_both(lab: Lab) -> None:
    path = lab.program("""
        import cupy, signal, time
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        print("ready", flush=True)
        time.sleep(0.5)
        cupy.launch(100)
        """)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        child = lab.start(PYTHON, path)
    finally:
        signal.signal(signal.SIGHUP, before)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGHUP)
        _, err = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 0, err
    assert lab.opened().table("kernels").num_rows == 100


def test_an_exception_raised_by_a_signal_handler_inside_a_callback_is_not_lost(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    """ctypes swallows what leaves a callback; here the main thread is in one most of its time."""
    run = lab.record("""
        import cupy, signal, sys, time
        def leave(*_):
            sys.exit(6)
        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        end = time.time() + 10
        while time.time() < end:
            cupy.capture(200)
            sum(range(10_000))
        """)
    assert run.code == 6
    assert capfd.readouterr().err == ""


def test_a_program_that_waits_for_a_blocked_signal_gets_it(lab: Lab) -> None:
    """Threads of ours must not take signals: one that the program blocked would kill the process there."""
    run = lab.record("""
        import cupy, os, signal, time
        cupy.launch(10)
        time.sleep(0.15)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.sigwait({signal.SIGTERM}) == signal.SIGTERM
        """)
    assert run.code == 0
    check_whole(run, 10)


def test_what_activation_and_farewell_cost_is_in_the_trace(lab: Lab) -> None:
    run = lab.record("import cupy; cupy.launch(10)")
    cost = run.trace.manifest.collectors["activity"].cost_ns
    assert 0 < cost < 2_000_000_000


def test_an_untraced_end_says_so(lab: Lab) -> None:
    with lab.start(PYTHON, "-c", "pass") as child:
        _, err = child.communicate(timeout=TIMEOUT_S)
    rest, said = own_lines(err)
    assert (child.returncode, rest) == (0, b"")
    assert said[:-1] == ["spikeprof: not traced: no process used CUDA; the program ran and exited with 0"]
    assert lab.opened().manifest.exit_code == 0


def test_nothing_is_left_behind(lab: Lab) -> None:
    began = time.time()
    run = lab.record("import cupy; cupy.launch(10)")
    assert run.outcome.trace is not None
    assert not (run.outcome.trace / "spool").exists()
    assert not (run.outcome.trace / "session.json").exists()
    assert time.time() - began < TIMEOUT_S


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}"])
def test_nobody_listens_and_the_exit_code_holds(lab: Lab, where: str) -> None:
    """Standard error full, closed, or a pipe whose reader has left."""
    path = lab.program("import cupy, sys; cupy.launch(10); sys.exit(9)")
    words = " ".join(lab.command(PYTHON, path)).replace("--no-summary", "")
    ended = subprocess.run(["bash", "-c", f"{words} {where}"], capture_output=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 9, ended.stderr
    assert lab.opened().table("kernels").num_rows == 10


def test_a_signal_handler_that_raises_while_we_end_changes_nothing(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """After the program's last exit handler nobody is left to catch it: no traceback of ours, and no record lost."""
    for n in range(3):
        run = lab.record(
            """
            import atexit, cupy, signal, sys
            def leave(*_):
                sys.exit(9)
            signal.signal(signal.SIGALRM, leave)
            atexit.register(lambda: signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005))
            cupy.launch(100)
            """,
            output=lab.folder / f"trace{n}",
        )
        # The timer goes on: it may hit the process after the interpreter has given signals their defaults back.
        assert run.code in {0, 128 + signal.SIGALRM}
        check_whole(run, 100)
        assert run.processes[0]["status"] == "traced"
        assert "_finish" not in capfd.readouterr().err


def test_the_exit_code_is_known_where_children_are_ignored(lab: Lab) -> None:
    path = lab.program("""
        import cupy, signal, sys
        cupy.launch(10)
        sys.exit(6 if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN else 7)
        """)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        child = lab.start(PYTHON, path)
    finally:
        signal.signal(signal.SIGCHLD, before)
    with child:
        child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 6
    assert lab.opened().manifest.exit_code == 6


def test_a_signal_while_the_program_is_being_started_reaches_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    start = launch._start

    def slowly(*arguments: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGUSR1)
        child = start(*arguments)
        os.kill(os.getpid(), signal.SIGUSR1)
        return child

    monkeypatch.setattr(launch, "_start", slowly)
    assert lab.record_command(["sleep", "20"]).code == 128 + signal.SIGUSR1
