from __future__ import annotations

import pytest

from spikeprof.profiler.hardware import PEAKS, lookup, products


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
