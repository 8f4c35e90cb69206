from __future__ import annotations

import pytest

from spikeprof.profiler.collectors.link_rates import nvlink_generation, nvlink_rate, pcie_rate


@pytest.mark.parametrize(("nvml", "generation"), [(1, 1), (3, 2), (4, 3), (5, 3), (6, 4), (7, 5), (0, 0), (99, 0)])
def test_nvml_counts_minor_versions(nvml: int, generation: int) -> None:
    assert nvlink_generation(nvml) == generation


@pytest.mark.parametrize(
    ("generation", "links", "both_ways"),
    [(1, 4, 160e9), (2, 6, 300e9), (3, 12, 600e9), (4, 18, 900e9), (5, 18, 1800e9)],
)
def test_all_links_in_both_directions_are_what_data_sheets_state(generation: int, links: int, both_ways: float) -> None:
    rate = nvlink_rate(generation, links, None)
    assert rate.bytes_per_s == both_ways / 2
    assert f"{both_ways / 1e9:g} GB/s both ways over {links} links" in rate.source


def test_the_line_rate_is_told_but_only_the_payload_counts() -> None:
    rate = nvlink_rate(4, 18, 26.562e9)
    assert rate.bytes_per_s == 18 * 25e9
    assert rate.source.startswith("18 x 25 GB/s of payload a link (")
    assert "NVML states 26.562 GB/s on the line" in rate.source


@pytest.mark.parametrize(("generation", "line"), [(3, 14.062e9), (0, 26.562e9), (4, 53.125e9)])
def test_links_that_do_not_run_at_their_generation_s_rate_have_the_driver_s(generation: int, line: float) -> None:
    rate = nvlink_rate(generation, 4, line)
    assert rate.bytes_per_s == 4 * line
    assert "payload" not in rate.source


def test_without_generation_and_speed_there_is_no_rate_but_a_reason() -> None:
    assert nvlink_rate(0, 18, None).bytes_per_s is None
    assert nvlink_rate(0, 18, None).source.startswith("the driver tells neither")


@pytest.mark.parametrize(
    ("generation", "lanes", "gb_per_s"),
    [
        (1, 16, 4.0),  # 16 × 2.5 / 8 × 8/10
        (3, 16, 15.754),  # 16 × 8 / 8 × 128/130
        (4, 8, 15.754),
        (5, 16, 63.015),
        (6, 16, 121.0),  # 16 × 64 / 8 × 242/256
    ],
)
def test_pcie_is_lanes_times_transfers_times_the_line_code(generation: int, lanes: int, gb_per_s: float) -> None:
    assert pcie_rate(generation, lanes).bytes_per_s == pytest.approx(gb_per_s * 1e9, rel=1e-4)


@pytest.mark.parametrize(("generation", "lanes"), [(0, 16), (7, 16), (5, None), (5, 0)])
def test_pcie_that_is_not_known_has_no_rate(generation: int, lanes: int | None) -> None:
    assert pcie_rate(generation, lanes).bytes_per_s is None
