from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from collectors.fake_gpm import FakeGpm
from collectors.fake_nvml import FakeNvml

from spikeprof.profiler import probes
from spikeprof.profiler.errors import CommandNotFound, UsageError
from spikeprof.profiler.probes import Probe, can_record
from spikeprof.profiler.probes_target import interpreter_of, target_probes


def machine(root: Path, **files: str) -> Path:
    """A file system with these files; ``__`` in a name stands for ``/``."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_driver_cannot_record(tmp_path: Path) -> None:
    probe = probes.driver_nodes(tmp_path)
    assert (probe.state, probe.detail, probe.fix) == ("no", "there is no /dev/nvidiactl", "install the driver")
    assert not can_record([probe])


def test_in_a_container_the_fix_is_how_it_was_started(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__1__cgroup="0::/kubepods/besteffort/pod1")
    assert "--gpus all" in probes.driver_nodes(root).fix
    assert probes.container(root).detail == "yes (kubepods in /proc/1/cgroup)"


def test_driver_nodes_that_are_all_open(tmp_path: Path) -> None:
    root = machine(tmp_path, dev__nvidiactl="", dev__nvidia0="", dev__nvidia1="")
    assert "no /dev/nvidia-uvm" in probes.driver_nodes(root).detail
    machine(tmp_path, **{"dev__nvidia-uvm": ""})
    probe = probes.driver_nodes(root)
    assert (probe.state, probe.detail) == ("ok", "device files of 2 GPU(s) are open to this user")


def test_driver_nodes_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, dev__nvidiactl="", dev__nvidia0="")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("nvidia0"))
    probe = probes.driver_nodes(root)
    assert (probe.state, probe.detail) == ("no", "this user may not open /dev/nvidia0")
    assert not can_record([probe])


def test_libcuda() -> None:
    def fails(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    assert probes.libcuda(lambda name: None).state == "ok"
    assert probes.libcuda(fails).state == "no"


def test_gpus() -> None:
    assert probes.gpus(FakeNvml(gpus=1)).detail == "driver 580.159.04; 0: NVIDIA H200"
    assert probes.gpus(FakeNvml(gpus=0)).state == "no"
    # Without NVML the samples are missing, not the recording.
    broken = probes.gpus(FakeNvml(init_error=RuntimeError("Driver Not Loaded")))
    assert (broken.state, broken.needed) == ("degraded", False)


@pytest.mark.parametrize(
    ("params", "capabilities", "state", "part"),
    [
        ("RmProfilingAdminOnly: 0\n", "0", "ok", "every user"),
        ("RmProfilingAdminOnly: 1\n", "0000000000000000", "degraded", "administrators only"),
        ("RmProfilingAdminOnly: 1\n", "0000000000200000", "ok", "CAP_SYS_ADMIN"),
        ("RmProfilingAdminOnly: 1\n", "0000004000000000", "ok", "CAP_PERFMON"),
    ],
)
def test_counters(tmp_path: Path, params: str, capabilities: str, state: str, part: str) -> None:
    root = machine(
        tmp_path, proc__driver__nvidia__params="Mobile: 1\n" + params, proc__self__status=f"CapEff:\t{capabilities}\n"
    )
    probe = probes.counters(root)
    assert probe.state == state
    assert part in probe.detail
    assert can_record([probe])


def opening(*refused: int, code: int = errno.ENOENT) -> Callable[[Any], int]:
    def system_call(attr: Any) -> int:
        if attr.config in refused:
            raise OSError(code, os.strerror(code))
        return os.open(os.devnull, os.O_RDONLY)

    return system_call


def test_cpu_counters(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__sys__kernel__perf_event_paranoid="4", sys__bus__event_source__devices__cpu__type="4")
    probe = probes.cpu_counters(opening(), root)
    assert (probe.state, probe.detail) == (
        "ok",
        "l1d_read_count, l1d_read_miss_count, llc_read_count, llc_read_miss_count",
    )
    some = probes.cpu_counters(opening(2, 0x10002), root)
    assert some.state == "degraded"
    assert some.detail == (
        "l1d_read_count, l1d_read_miss_count, not llc_read_count (this CPU counts no such event), "
        "not llc_read_miss_count (this CPU counts no such event)"
    )
    none = probes.cpu_counters(opening(0, 2, 0x10000, 0x10002, code=errno.EACCES), root)
    assert (none.state, none.detail) == ("degraded", "kernel.perf_event_paranoid is 4, which refuses them to this user")
    assert none.fix == "sysctl kernel.perf_event_paranoid=2, or the capability CAP_PERFMON"


def test_cpu_counters_of_a_virtual_machine(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__sys__kernel__perf_event_paranoid="1")
    assert "no hardware events" in probes.cpu_counters(opening(0, 2, 0x10000, 0x10002), root).detail


def test_gpm() -> None:
    probe = probes.gpm(FakeGpm())
    assert (probe.state, probe.detail) == (
        "ok",
        "SM, tensor, DRAM, PCIe and NVLink rates of GPU 0, GPU 1, for every user",
    )
    one = probes.gpm(FakeGpm(gpm=(1,)))
    assert one.state == "degraded"
    assert one.detail.endswith(
        "of GPU 1, for every user; GPU 0: no GPM on NVIDIA H200 (it exists from Hopper, sm_90, on)"
    )
    assert probes.gpm(FakeGpm(gpus=0)).detail == "NVML shows no GPU"
    assert probes.gpm(FakeGpm(init_error=RuntimeError("Driver Not Loaded"))).state == "degraded"


def test_trace_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.trace_folder(tmp_path).state == "ok"
    assert list(tmp_path.iterdir()) == []
    missing = probes.trace_folder(tmp_path / "nowhere")
    assert (missing.state, missing.needed) == ("no", True)
    monkeypatch.setattr(probes, "FREE_BYTES_WANTED", 1 << 62)
    assert probes.trace_folder(tmp_path).state == "degraded"


def test_cupti_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes.metadata, "version", lambda name: {"cupti-python": "13.4.0"}[name])
    monkeypatch.setattr(
        probes.importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    )
    assert probes.cupti_python().detail == "13.4.0, without PM sampling"
    (tmp_path / "pm_sampling.py").touch()
    assert probes.cupti_python().detail == "13.4.0, with PM sampling"

    def missing(name: str) -> str:
        raise probes.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(probes.metadata, "version", missing)
    assert "not installed" in probes.cupti_python().detail


def test_a_probe_that_breaks_does_not_take_the_others_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> Probe:
        raise ValueError("odd machine")

    monkeypatch.setattr(probes, "counters", breaks)
    found = {p.name: p for p in probes.machine_probes(tmp_path)}
    assert found["counters"].detail == "could not be checked: ValueError: odd machine"
    assert found["spikeprof's Python"].state == "ok"


@pytest.mark.parametrize(
    ("flags", "state", "part"),
    [
        ([], "ok", "loads the agent"),
        (["-P"], "ok", "loads the agent"),
        (["-X", "utf8", "-u"], "ok", "loads the agent"),
        (["-S"], "no", "skips sitecustomize (-S)"),
        (["-I"], "no", "ignores PYTHONPATH (-I or -E)"),
        (["-sE"], "no", "ignores PYTHONPATH (-I or -E)"),
    ],
)
def test_injection_into_a_real_interpreter(flags: list[str], state: str, part: str) -> None:
    probe = target_probes([sys.executable, *flags, "infer.py", "-I"])[0]
    assert probe.state == state
    assert part in probe.detail
    if state == "no":
        assert probe.fix == f"start the program without {' '.join(flags)}"


def test_an_existing_sitecustomize_is_chained_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello from the site')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = target_probes([sys.executable])[0]
    assert probe.state == "ok"
    assert f"{tmp_path / 'sitecustomize.py'} is run, too" in probe.detail


def test_an_interpreter_that_does_not_answer(tmp_path: Path) -> None:
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho no such runtime >&2\nexit 7\n")
    fake.chmod(0o755)
    (probe,) = target_probes([str(fake)])
    assert (probe.state, probe.detail) == ("no", f"{fake} does not answer: no such runtime")


def test_an_interpreter_that_is_too_old(tmp_path: Path) -> None:
    fake = tmp_path / "python3"
    fake.write_text(
        """#!/bin/sh\necho 'spikeprof-probe:{"executable": "/opt/python", "version": [3, 8, 18]}'\n""",
    )
    fake.chmod(0o755)
    (probe,) = target_probes([str(fake)])
    assert (probe.state, probe.detail) == ("no", "3.8.18 (/opt/python) is older than 3.9")


def test_the_interpreter_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable} -s\nimport vllm\n")
    script.chmod(0o755)
    assert interpreter_of([str(script), "serve", "-I"]) == [sys.executable, "-s"]
    script.write_text("#!/usr/bin/env -S python3\n")
    assert Path(interpreter_of([str(script)])[0]).name == "python3"


def test_a_command_that_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a Python interpreter nor a Python script"):
        interpreter_of(["sh", "-c", "python infer.py"])
    with pytest.raises(CommandNotFound, match="no-such-command: command not found"):
        interpreter_of(["no-such-command"])
