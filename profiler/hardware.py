"""Peak rates of GPU products and limits of their SMs, each with where it comes from: the numbers of ``hardware.toml``.

A product or architecture that is not listed, and a rate that its vendor does not state, is None: never a guess.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

_BRANDS = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct"})


@dataclass(frozen=True, slots=True)
class Peak:
    """One stated number, in the unit that the field holding it names, and its source."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the vendor states of one GPU, without structured sparsity. None = not stated or not there.

    ``*_flop_per_s`` are dense matrix rates that accumulate in FP32 (``int8_op_per_s`` in INT32), but
    ``fp32_flop_per_s`` is that of the vector units. ``link_bytes_per_s`` is NVLink or Infinity Fabric:
    all links of the GPU, both directions together; one direction has half of it.
    """

    product: str
    dram_bytes_per_s: Peak | None = None
    bf16_flop_per_s: Peak | None = None
    fp16_flop_per_s: Peak | None = None
    fp8_flop_per_s: Peak | None = None
    int8_op_per_s: Peak | None = None
    fp32_flop_per_s: Peak | None = None
    link_bytes_per_s: Peak | None = None
    l2_bytes: Peak | None = None
    sm_count: Peak | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one SM of an architecture holds at most, and the units in which registers and shared memory are given out.

    Per SM: ``warps_count``, ``blocks_count``, ``registers_count``, ``shared_bytes``. Per block: ``block_*``, of which
    ``block_reserved_bytes`` of shared memory are the driver's own. ``register_unit_count`` registers are a unit of what
    a warp gets, from one of ``partitions_count`` equal parts of the SM; ``shared_unit_bytes`` of what a block gets.
    ``carve_out_bytes`` are the sizes that shared memory can have, ascending, and ``cluster_blocks_count`` is 1 where
    there are no clusters.
    """

    name: str
    warps_count: Peak
    blocks_count: Peak
    block_threads_count: Peak
    registers_count: Peak
    block_registers_count: Peak
    thread_registers_count: Peak
    shared_bytes: Peak
    block_shared_bytes: Peak
    block_reserved_bytes: Peak
    register_unit_count: Peak
    partitions_count: Peak
    shared_unit_bytes: Peak
    cluster_blocks_count: Peak
    carve_out_bytes: tuple[Peak, ...]


#: The names of the rates a ``Gpu`` may state.
PEAKS = tuple(f.name for f in fields(Gpu) if f.name != "product")


def lookup(name: str) -> Gpu | None:
    """The product that a driver calls ``name`` (``NVIDIA H200``, ``Tesla V100-SXM2-16GB``), or None.

    The whole name must match, brand words and punctuation aside: a slice of a GPU (MIG), a laptop or
    an export variant has rates of its own, and is unknown unless listed.
    """
    return _by_name().get(_key(name))


def products() -> tuple[Gpu, ...]:
    """Every product listed."""
    return tuple(dict.fromkeys(_by_name().values()))


def architecture(name: str) -> Architecture | None:
    """The architecture that a trace calls ``name`` (``sm_90``), or None."""
    return _architectures().get(name)


def architectures() -> tuple[Architecture, ...]:
    """Every architecture listed."""
    return tuple(_architectures().values())


def _key(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return " ".join(word for word in words if word not in _BRANDS)


@cache
def _data() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("spikeprof.profiler").joinpath("hardware.toml").read_text(encoding="utf-8"))


@cache
def _by_name() -> Mapping[str, Gpu]:
    data = _data()
    sources: Mapping[str, str] = data["sources"]
    found: dict[str, Gpu] = {}
    for entry in data["products"]:
        gpu = _gpu(entry, sources)
        for name in entry["names"]:
            if _key(name) in found:
                raise ValueError(f"hardware.toml lists {name!r} twice")
            found[_key(name)] = gpu
    return found


def _gpu(entry: Mapping[str, Any], sources: Mapping[str, str]) -> Gpu:
    peaks = {name: Peak(float(value), sources[key]) for name, (value, key) in entry["peaks"].items()}
    return Gpu(product=entry["name"], **peaks)


@cache
def _architectures() -> Mapping[str, Architecture]:
    sources: Mapping[str, str] = _data()["sources"]
    found: dict[str, Architecture] = {}
    for entry in _data()["architectures"]:
        limits = {name: Peak(float(value), sources[key]) for name, (value, key) in entry["limits"].items()}
        sizes, key = entry["carve_out_bytes"]
        carve_outs = tuple(Peak(float(size), sources[key]) for size in sizes)
        if entry["name"] in found:
            raise ValueError(f"hardware.toml lists {entry['name']!r} twice")
        found[entry["name"]] = Architecture(entry["name"], **limits, carve_out_bytes=carve_outs)
    return found
