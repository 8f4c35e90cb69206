"""The topology of a real machine, and copies over its links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from spikeprof.profiler.collectors.copy_probe import measure, with_copies
from spikeprof.profiler.collectors.topology import TopologyCollector

HOST = -1


def gpus_count() -> int:
    import torch

    return int(torch.cuda.device_count())


def free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info(0)[0])


@pytest.fixture(scope="module")
def links() -> dict[tuple[int, int], dict[str, Any]]:
    """Every row, measured, by its ends."""
    collector = TopologyCollector()
    collector.start(0)
    copies = measure()
    note, tables = collector.stop()
    assert note.state in ("ok", "degraded"), note.reason
    rows = with_copies(tables["topology"], collector.gpus, copies).to_pylist()
    return {(row["src_device"], row["dst_device"]): row for row in rows}


def test_every_pair_and_both_ways_to_the_host_are_there(links: dict[tuple[int, int], dict[str, Any]]) -> None:
    ends = {end for pair in links for end in pair}
    assert HOST in ends
    gpus = sorted(ends - {HOST})
    assert set(links) == {(a, b) for a in ends for b in ends if a != b}
    assert len(gpus) >= gpus_count()


def test_host_copies_reach_a_good_part_of_pcie_and_no_more_than_all(
    links: dict[tuple[int, int], dict[str, Any]],
) -> None:
    for ends, row in links.items():
        if HOST in ends:
            assert row["measured_bytes_per_s"], row["measured_reason"]
            if row["peak_bytes_per_s"] is None:
                pytest.skip(f"the driver does not tell PCIe generation and width here: {row['peak_source']}")
            assert 0.3 < row["measured_bytes_per_s"] / row["peak_bytes_per_s"] <= 1.0, row


def test_peer_copies_reach_a_good_part_of_nvlink_and_no_more_than_all(
    links: dict[tuple[int, int], dict[str, Any]],
) -> None:
    pairs = [row for ends, row in links.items() if HOST not in ends]
    if not pairs:
        pytest.skip("one GPU: there is no peer to copy to")
    for row in pairs:
        if row["kind"] not in ("nvlink", "nvswitch"):
            pytest.skip("NVLink does not join the GPUs here")
        assert row["peer_access"] == "ok"
        assert row["measured_bytes_per_s"], row["measured_reason"]
        assert 0.6 < row["measured_bytes_per_s"] / row["peak_bytes_per_s"] <= 1.0, row


def test_two_h200s_have_18_links_of_nvlink_4(links: dict[tuple[int, int], dict[str, Any]]) -> None:
    import torch

    if gpus_count() < 2 or "H200" not in torch.cuda.get_device_name(0) or "NVL" in torch.cuda.get_device_name(0):
        pytest.skip("needs two H200 SXM")
    row = links[0, 1]
    assert (row["kind"], row["generation"], row["links_count"]) == ("nvswitch", 4, 18)
    assert row["peak_bytes_per_s"] == 450e9
    assert "26.562 GB/s on the line" in row["peak_source"]


def test_the_copies_give_everything_back() -> None:
    import torch

    torch.cuda.init()
    before = free_bytes()
    assert measure().bytes_per_s
    assert before - free_bytes() < 16 << 20


def test_copies_keep_to_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert len(measure().bytes_per_s) == 2


def test_the_command_prints_what_it_measured() -> None:
    command = [sys.executable, "-m", "spikeprof", "topology", "--measure"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert any(row["measured_bytes_per_s"] for row in answer["links"])
    plain = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "COLUMNS": "80"}
    )
    assert plain.returncode == 0, plain.stderr
    assert max(map(len, plain.stdout.splitlines())) <= 80
