from __future__ import annotations

import dataclasses

import pytest

from spikeprof.profiler.hardware import PEAKS, Peak, architecture, architectures, lookup, products


@pytest.mark.parametrize(
    ("name", "product", "dram_bytes_per_s", "sm_count"),
    [
        ("NVIDIA H200", "NVIDIA H200 SXM", 4.8e12, 132),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM", 3.35e12, 132),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe", 2.0e12, 114),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB SXM", 2.039e12, 108),
        ("A100-SXM4-40GB", "NVIDIA A100 40GB SXM", 1.555e12, 108),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB PCIe", 1.935e12, 108),
        ("Tesla V100-SXM2-16GB", "NVIDIA V100 SXM2", 9e11, 80),
        ("Tesla T4", "NVIDIA T4", 3.2e11, 40),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", 1.008e12, 128),
        ("AMD Instinct MI300X VF", "AMD Instinct MI300X", 5.3e12, 304),
    ],
)
def test_names_as_drivers_give_them(name: str, product: str, dram_bytes_per_s: float, sm_count: int) -> None:
    gpu = lookup(name)
    assert gpu is not None
    assert gpu.product == product
    assert gpu.dram_bytes_per_s is not None
    assert gpu.dram_bytes_per_s.value == dram_bytes_per_s
    assert gpu.sm_count is not None
    assert gpu.sm_count.value == sm_count


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "NVIDIA H100",  # SXM, PCIe or NVL: it does not say
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-PG509-200",
        "AMD Instinct MI250X/MI250",
    ],
)
def test_what_is_not_listed_is_not_guessed(name: str) -> None:
    assert lookup(name) is None


def test_every_number_has_a_source_and_is_plausible() -> None:
    assert len(products()) >= 20
    for gpu in products():
        stated = {name: peak for name in PEAKS if (peak := getattr(gpu, name)) is not None}
        assert {"dram_bytes_per_s", "fp16_flop_per_s", "fp32_flop_per_s", "sm_count"} <= set(stated), gpu.product
        for name, peak in stated.items():
            assert len(peak.source) > 8, (gpu.product, name)
            low, high = {"dram_bytes_per_s": (3e11, 1e13), "sm_count": (20, 400)}.get(name, (1e6, 1e16))
            assert low <= peak.value <= high, (gpu.product, name)


def test_rates_are_dense() -> None:
    """Marketing doubles them for sparsity: FP8 is twice FP16, not four times."""
    for gpu in products():
        if gpu.fp8_flop_per_s and gpu.fp16_flop_per_s:
            assert 1.9 < gpu.fp8_flop_per_s.value / gpu.fp16_flop_per_s.value < 2.1, gpu.product


def test_a_rate_that_the_product_lacks_is_none() -> None:
    v100 = lookup("Tesla V100-SXM2-32GB")
    assert v100 is not None
    assert v100.fp8_flop_per_s is None
    assert v100.bf16_flop_per_s is None


# -- architectures -----------------------------------------------------------------------------------------------------


def test_what_an_sm_of_hopper_holds() -> None:
    hopper = architecture("sm_90")
    assert hopper is not None
    assert hopper.warps_count.value == 64
    assert hopper.shared_bytes.value == 228 * 1024
    assert hopper.block_shared_bytes.value == 227 * 1024
    assert hopper.block_reserved_bytes.value == 1024
    assert [size.value / 1024 for size in hopper.carve_out_bytes] == [0, 8, 16, 32, 64, 100, 132, 164, 196, 228]


@pytest.mark.parametrize("name", ["", "sm_60", "sm_99", "sm_90a", "gfx942", "90"])
def test_an_architecture_that_is_not_listed_is_not_guessed(name: str) -> None:
    assert architecture(name) is None


def test_every_limit_has_a_source_and_is_plausible() -> None:
    assert {"sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"} <= {
        a.name for a in architectures()
    }
    for one in architectures():
        for field in dataclasses.fields(one):
            value = getattr(one, field.name)
            for limit in value if isinstance(value, tuple) else (value,):
                assert isinstance(limit, Peak) or field.name == "name"
                assert field.name == "name" or len(limit.source) > 8, (one.name, field.name)
        assert one.blocks_count.value <= one.warps_count.value
        assert one.block_threads_count.value == 1024
        assert one.registers_count.value % (one.partitions_count.value * one.register_unit_count.value) == 0
        assert one.block_shared_bytes.value + one.block_reserved_bytes.value == one.shared_bytes.value
        sizes = [size.value for size in one.carve_out_bytes]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == one.shared_bytes.value
