from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from collectors import fake_links
from collectors.fake_links import FakeLinks, NVMLError

from spikeprof.profiler.collecting import stop_all
from spikeprof.profiler.collectors import topology
from spikeprof.profiler.collectors.nvml_links import bus_address
from spikeprof.profiler.collectors.topology import TopologyCollector
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote

NOT_ASKED = "not asked for: `spikeprof topology --measure` copies over every link"
NOWHERE = Path("/nonexistent")

Rows = dict[tuple[int, int], dict[str, Any]]


def collected(fake: Any, sysfs: Path = NOWHERE) -> tuple[CollectorNote, Rows]:
    collector = TopologyCollector(fake, sysfs)
    collector.start(0)
    note, tables = collector.stop()
    if not tables:
        return note, {}
    assert tables["topology"].schema == TABLES["topology"].arrow
    assert note.records_count == tables["topology"].num_rows
    return note, {(row["src_device"], row["dst_device"]): row for row in tables["topology"].to_pylist()}


def test_two_h200s_of_a_virtual_machine() -> None:
    fake = fake_links.h200_pair()
    note, rows = collected(fake)
    assert (note.state, note.reason) == ("ok", "")
    assert set(rows) == {(0, 1), (1, 0), (-1, 0), (0, -1), (-1, 1), (1, -1)}
    source = rows[0, 1].pop("peak_source")
    assert source.startswith("18 x 25 GB/s of payload a link (H100 data sheet")
    assert "26.562 GB/s on the line" in source
    assert rows[0, 1] == {
        "src_device": 0,
        "dst_device": 1,
        "kind": "nvswitch",
        "pcie_path": "NODE",
        "generation": 4,
        "max_generation": 4,
        "links_count": 18,
        "max_links_count": 18,
        "peer_access": "ok",
        "numa_node": -1,
        "peak_bytes_per_s": 450e9,
        "measured_bytes_per_s": None,
        "measured_reason": NOT_ASKED,
    }
    assert rows[1, -1] == {
        "src_device": 1,
        "dst_device": -1,
        "kind": "pcie",
        "pcie_path": "",
        "generation": 5,
        "max_generation": 5,
        "links_count": 16,
        "max_links_count": 16,
        "peer_access": "",
        "numa_node": 0,
        "peak_bytes_per_s": pytest.approx(63.015e9, rel=1e-5),
        "peak_source": "PCIe 5 x16: 16 lanes x 32 GT/s x 128/130 (PCIe base specification)",
        "measured_bytes_per_s": None,
        "measured_reason": NOT_ASKED,
    }
    assert fake.inits_count == fake.shutdowns_count == 1


def test_one_gpu_without_nvlink_is_no_fault() -> None:
    note, rows = collected(fake_links.h200_alone())
    assert (note.state, note.reason) == ("ok", "")
    assert set(rows) == {(-1, 0), (0, -1)}


@pytest.mark.parametrize("late", [False, True])
def test_links_that_are_up_in_one_of_two_readings_count(late: bool) -> None:
    fake = fake_links.h200_pair()
    up, down = fake.nvlinks, ((), ())
    fake.nvlinks = down if late else up
    collector = TopologyCollector(fake, NOWHERE)
    collector.start(0)
    while collector._machine is None:
        time.sleep(0.001)
    fake.nvlinks = up if late else down
    note, tables = collector.stop()
    (row,) = [r for r in tables["topology"].to_pylist() if (r["src_device"], r["dst_device"]) == (0, 1)]
    assert (row["kind"], row["links_count"], row["peak_bytes_per_s"]) == ("nvswitch", 18, 450e9)
    assert note.state == "ok"


def test_access_over_nvlink_without_an_active_link_has_no_rate_and_says_why() -> None:
    fake = fake_links.h200_pair()
    fake.nvlinks = ((), fake.nvlinks[1])
    _, rows = collected(fake)
    assert (rows[0, 1]["kind"], rows[0, 1]["peak_bytes_per_s"]) == ("nvlink", None)
    assert rows[0, 1]["peak_source"] == (
        "the driver shows no NVLink of GPU 0 as active, though it grants access over NVLink"
    )


def test_the_slower_end_decides_on_pcie_and_a_sleeping_link_keeps_its_rate() -> None:
    note, rows = collected(fake_links.pcie_only())
    assert note.state == "ok"
    pair = rows[0, 1]
    assert (pair["kind"], pair["pcie_path"]) == ("pcie", "SYS")
    assert pair["peer_access"] == "the chipset does not support it"
    assert (pair["generation"], pair["max_generation"]) == (1, 4)
    assert (pair["links_count"], pair["max_links_count"]) == (8, 16)
    assert pair["peak_bytes_per_s"] == rows[1, -1]["peak_bytes_per_s"] == pytest.approx(15.754e9, rel=1e-4)
    assert rows[0, -1]["peak_bytes_per_s"] == pytest.approx(31.508e9, rel=1e-4)


def test_direct_links_are_counted_by_the_peer_s_address() -> None:
    note, rows = collected(fake_links.three_v100())
    assert note.state == "ok"
    assert {ends: (row["kind"], row["links_count"], row["max_links_count"]) for ends, row in rows.items()} == {
        (0, 1): ("nvlink", 2, 2),
        (1, 0): ("nvlink", 2, 2),
        (1, 2): ("nvlink", 1, 1),
        (2, 1): ("nvlink", 1, 2),  # the one that is down may lead there
        (0, 2): ("pcie", 16, 16),
        (2, 0): ("pcie", 16, 16),
        **dict.fromkeys(((-1, 0), (0, -1), (-1, 1), (1, -1), (-1, 2), (2, -1)), ("pcie", 16, 16)),
    }
    assert rows[0, 1]["peak_bytes_per_s"] == 50e9
    assert (rows[0, 2]["peer_access"], rows[0, 2]["pcie_path"]) == ("ok", "PHB")


def hidden(gpus: int, remote: int = fake_links.UNKNOWN) -> FakeLinks:
    links = ((1, remote, fake_links.HIDDEN),) * 4
    return FakeLinks((links,) * gpus, 4, p2p=(0, 0, 0, 0, 0))


def test_hidden_peers_follow_from_p2p_status_where_they_can() -> None:
    _, two = collected(hidden(2, fake_links.GPU))
    assert (two[0, 1]["kind"], two[0, 1]["links_count"], two[0, 1]["peak_bytes_per_s"]) == ("nvlink", 4, 100e9)
    note, three = collected(hidden(3))
    assert note.state == "ok"
    assert (three[0, 1]["kind"], three[0, 1]["links_count"], three[0, 1]["peak_bytes_per_s"]) == ("nvlink", None, None)
    assert three[0, 1]["peak_source"] == "the driver does not tell which GPU each NVLink leads to"


def test_links_count_is_that_of_the_poorer_end_of_a_switch() -> None:
    up, down = (1, fake_links.SWITCH, fake_links.HIDDEN), (0, fake_links.UNKNOWN, fake_links.HIDDEN)
    barred = (3, fake_links.SWITCH, fake_links.HIDDEN)
    _, rows = collected(FakeLinks(((up,) * 18, (up,) * 16 + (down, barred)), 6, p2p=(0, 0, 0, 0, 5)))
    assert (rows[0, 1]["links_count"], rows[0, 1]["max_links_count"]) == (16, 16)
    assert (rows[1, 0]["links_count"], rows[1, 0]["max_links_count"]) == (16, 18)


def test_the_higher_of_two_readings_of_the_pcie_generation_counts() -> None:
    fake = fake_links.h200_alone(pcie=((1, 5, 16, 16),))
    collector = TopologyCollector(fake, NOWHERE)
    collector.start(0)
    deadline = time.monotonic() + 30
    while collector._machine is None and time.monotonic() < deadline:
        time.sleep(0.001)
    fake.pcie[0] = (4, 5, 16, 16)
    note, tables = collector.stop()
    assert note.state == "ok"
    assert set(tables["topology"]["generation"].to_pylist()) == {4}


def test_numa_nodes_are_the_kernel_s_or_else_the_driver_s(tmp_path: Path) -> None:
    for bus, node in ((0, 1), (1, -1)):
        folder = tmp_path / f"bus/pci/devices/0000:{bus:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    _, rows = collected(fake_links.h200_pair(affinity=(0b1000, 0, 0, 0)), tmp_path)
    assert (rows[-1, 0]["numa_node"], rows[-1, 1]["numa_node"]) == (1, 3)
    _, rows = collected(fake_links.h200_pair(affinity=(0b11, 0, 0, 0)), tmp_path)
    assert (rows[-1, 0]["numa_node"], rows[-1, 1]["numa_node"]) == (1, -1)  # two nodes are as near: none is told


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"nvmlDeviceGetNvLinkState": NVMLError("GPU is lost")}, "the NVLinks could not be read (GPU is lost)"),
        ({"nvmlDeviceGetNvLinkVersion": NVMLError("Unknown Error")}, "the version of NVLink could not be read (Unkn"),
        ({"nvmlDeviceGetP2PStatus": NVMLError("GPU is lost")}, "P2P status could not be read (GPU is lost)"),
        ({"nvmlDeviceGetTopologyCommonAncestor": AttributeError}, "where GPUs meet on PCIe could not be read ("),
        (
            {"nvmlDeviceGetCurrPcieLinkWidth": NVMLError("Not Supported")},
            "the driver does not give PCIe generation and width of GPU 0, 1",
        ),
        (
            {"nvmlDeviceGetNvLinkVersion": 0, "nvmlDeviceGetFieldValues": NVMLError("Not Supported")},
            "the driver does not give the speed of NVLink of GPU 0, 1",
        ),
    ],
)
def test_what_the_driver_refuses_is_the_note_and_the_rest_stays(broken: dict[str, Any], reason: str) -> None:
    note, rows = collected(fake_links.h200_pair(broken=broken))
    assert note.state == "degraded"
    assert note.reason.startswith(reason)
    assert len(rows) == 6


@pytest.mark.parametrize(
    "broken",
    [
        {"nvmlDeviceGetNvLinkRemotePciInfo": AttributeError, "nvmlDeviceGetMemoryAffinity": AttributeError},
        {"nvmlDeviceGetNvLinkRemoteDeviceType": NVMLError("Not Supported")},
        {"nvmlDeviceGetFieldValues": AttributeError},
    ],
)
def test_what_can_be_found_out_otherwise_is_not_missed(broken: dict[str, Any]) -> None:
    note, rows = collected(fake_links.h200_pair(broken=broken))
    assert note.state == "ok"
    assert rows[0, 1]["peak_bytes_per_s"] == 450e9


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        ({"nvmlDeviceGetNvLinkVersion": 77, "nvmlDeviceGetFieldValues": NVMLError("x")}, "nvswitch"),
        ({"nvmlDeviceGetP2PStatus": 42}, "pcie"),
        ({"nvmlDeviceGetNvLinkState": 9}, "nvlink"),
        ({"nvmlDeviceGetMaxPcieLinkGeneration": 99}, "nvswitch"),
    ],
)
def test_numbers_that_mean_nothing_make_nothing_up(broken: dict[str, Any], kind: str) -> None:
    _, rows = collected(fake_links.h200_pair(broken=broken))
    assert rows[0, 1]["kind"] == kind
    known = [row for row in rows.values() if row["peak_bytes_per_s"]]
    assert all(row["peak_bytes_per_s"] in (450e9, pytest.approx(63.015e9, rel=1e-4)) for row in known)


def test_nonsense_is_a_note() -> None:
    note, rows = collected(fake_links.h200_pair(broken={"nvmlDeviceGetCurrPcieLinkGeneration": "five"}))
    assert (note.state, rows) == ("refused", {})
    assert note.reason.startswith("NVML's answers make no sense (ValueError")


@pytest.mark.parametrize(
    ("fake", "why"),
    [
        (fake_links.h200_pair(init_error=RuntimeError("Driver Not Loaded")), "NVML does not start: Driver Not Loaded"),
        (FakeLinks(()), "NVML shows no GPU"),
        (fake_links.h200_pair(unsupported=("nvmlDeviceGetCount",)), "NVML cannot list the GPUs: Not Supported"),
    ],
)
def test_a_refusal_is_a_note_not_an_exception(fake: FakeLinks, why: str) -> None:
    note, rows = collected(fake)
    assert (note.state, note.reason, rows) == ("refused", why, {})
    assert fake.inits_count == fake.shutdowns_count


def test_a_missing_pynvml_is_said_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert collected(None)[0] == CollectorNote("refused", "pynvml is not installed (pip install nvidia-ml-py)")


def test_stop_without_start_and_a_second_stop_are_off() -> None:
    collector = TopologyCollector(fake_links.h200_pair(), NOWHERE)
    assert collector.stop() == (CollectorNote("off", "not started"), {})
    collector.start(0)
    assert collector.stop()[0].state == "ok"
    assert collector.stop() == (CollectorNote("off", "stopped"), {})


def test_a_driver_that_hangs_does_not_hang_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_JOIN_SECONDS", 0.05)
    answer = threading.Event()

    class Hanging(FakeLinks):
        def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
            answer.wait(60)
            return 5

    assert collected(Hanging(((),))) == (CollectorNote("refused", "NVML stopped answering"), {})
    answer.set()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", (0, 0x3B, 0)),
        (b"0001:af:1f.0\x00\x00", (1, 0xAF, 0x1F)),
        ("FFFFFFFF:FF:FF.0", None),
        ("FFFFFFFF:FFFF:FF.0", None),
        ("00000000:100:00.0", None),
        ("", None),
        (None, None),
    ],
)
def test_bus_addresses(text: Any, address: tuple[int, ...] | None) -> None:
    assert bus_address(text) == address


def test_gpus_are_numbered_alike_where_no_gauge_is_read() -> None:
    """``--nvml-interval-ms 0``: kernels must still find the counters and the links of their GPU."""
    collector = TopologyCollector(fake_links.h200_pair(), NOWHERE)
    collector.start(0)
    assert sorted(stop_all([collector]).ordinals.values()) == [0, 1]
