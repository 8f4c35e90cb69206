"""GPU tests: skipped with the reason where there is no GPU, never passed."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest


@functools.cache
def _why_not() -> str:
    probe = "import torch; print(torch.cuda.is_available() and torch.version.cuda is not None)"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if found.returncode:
        return "torch cannot be imported here"
    return "" if found.stdout.strip() == "True" else "no NVIDIA GPU that torch can use"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and, where needed, skip everything in this folder."""
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if _why_not():
                item.add_marker(pytest.mark.skip(reason=_why_not()))
