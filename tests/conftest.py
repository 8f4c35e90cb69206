"""Fixtures for tests of several folders."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parent / "collectors" / "fake_pm.c"


@pytest.fixture(scope="session")
def pm_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path that holds a libcupti with PM sampling, made for tests, and a libcuda."""
    if importlib.util.find_spec("cupti") is None or importlib.util.find_spec("cupti.pm_sampling") is None:
        pytest.skip("cupti-python without PM sampling")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to build the fake libcupti with")
    site = tmp_path_factory.mktemp("site")
    folder = site / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    build = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", str(_SOURCE)]
    for name in ("libcupti.so.13", "libnvperf_host.so", "libnvperf_target.so", "libcuda.so.1"):
        only = [] if "cupti" in name else ["-DHELPER"]
        subprocess.run([*build, *only, f"-Wl,-soname,{name}", "-o", str(folder / name)], check=True)
    return site


@pytest.fixture
def pm_gpu(pm_libraries: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one GPU, as far as the samplers of counters can see; the environment sets how it behaves."""
    monkeypatch.syspath_prepend(str(pm_libraries))
    monkeypatch.setenv("PYTHONPATH", str(pm_libraries))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(pm_libraries / "nvidia" / "cu13" / "lib"))
    return monkeypatch
