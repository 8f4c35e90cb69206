from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from inject.harness import Lab

SOURCE = Path(__file__).with_name("fake_cupti.c")


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake libcupti, compiled once."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler is here to build the fake libcupti")
    library = tmp_path_factory.mktemp("cupti") / "libcupti.so.13"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-pthread", "-o", library, SOURCE], check=True)
    return library


@pytest.fixture
def lab(tmp_path: Path, fake_cupti: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, fake_cupti, monkeypatch)
