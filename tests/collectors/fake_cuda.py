"""Builds the fake libcuda (``fake_cuda.c``) for tests that copy."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

#: UUIDs of its GPUs.
UUIDS = tuple(f"GPU-00000000-0000-0000-0000-{n:012x}" for n in range(8))


def built(folder: Path) -> Path:
    """``libcuda.so.1`` in the folder; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler is here to build the fake libcuda")
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source], check=True)
    return library
