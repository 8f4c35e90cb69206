"""Occupancy as worked out from a recording, against what the driver says about the very functions."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spikeprof.analyzers.derived.intervals import ints
from spikeprof.analyzers.derived.occupancy import Shapes, occupancy
from spikeprof.profiler.hardware import architecture
from spikeprof.profiler.importers import open_trace

PROGRAM = Path(__file__).with_name("occupancy_launches.py")
SPIKEPROF = shlex.split(os.environ.get("SPIKEPROF_TEST_COMMAND", f"{sys.executable} -m spikeprof"))


@pytest.fixture(scope="module")
def asked() -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--ask"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    if kept := os.environ.get("SPIKEPROF_KEEP"):  # to be recorded for tests without a GPU
        Path(kept, "occupancy_h200.json").write_text(done.stdout)
    return found


def blocks(threads: list[int], registers: list[int], shared: list[int]) -> list[int]:
    import torch

    major, minor = torch.cuda.get_device_capability()
    shapes = Shapes(ints(threads), ints(registers), ints(shared), ints([0] * len(threads)))
    return occupancy(shapes, [architecture(f"sm_{major}{minor}")]).blocks.tolist()


def test_blocks_are_those_of_the_driver(asked: list[dict[str, Any]]) -> None:
    """Of 50 different kernels and more, launches in clusters among them."""
    columns = ([row[name] for row in asked] for name in ("threads", "registers"))
    ours = blocks(*columns, [row["static"] + row["dynamic"] for row in asked])
    assert not [(row, found) for row, found in zip(asked, ours, strict=True) if row["blocks"] != found]
    assert len({row["symbol"] for row in asked}) >= 50
    assert any(row["cluster"] > 1 for row in asked) or is_before_hopper()


def is_before_hopper() -> bool:
    import torch

    return bool(torch.cuda.get_device_capability()[0] < 9)


def test_a_recording_leads_to_the_blocks_that_the_driver_has(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    """CUPTI gives some kernels more registers than the driver does: 16 of 12, 32 of 24 or 31."""
    command = [*SPIKEPROF, "run", "--no-summary", "-o", str(tmp_path / "trace"), "--", sys.executable, str(PROGRAM)]
    assert subprocess.run(command, capture_output=True, timeout=240, check=False).returncode == 0
    kernels = open_trace(tmp_path / "trace").table("kernels").to_pandas()
    threads = (kernels.block_x * kernels.block_y * kernels.block_z).tolist()
    static, dynamic = kernels.shared_static_bytes.tolist(), kernels.shared_dynamic_bytes.tolist()
    ours = blocks(threads, kernels.registers_count.tolist(), [a + b for a, b in zip(static, dynamic, strict=True)])
    recorded = set(zip(threads, static, dynamic, ours, strict=True))
    assert {tuple(row[name] for name in ("threads", "static", "dynamic", "blocks")) for row in asked} <= recorded
