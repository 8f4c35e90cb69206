"""Peak rates of GPU products, each with where it comes from. The numbers are in ``hardware.toml``.

A product that is not listed, and a rate that its vendor does not state, is None: never a guess.
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


def _key(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return " ".join(word for word in words if word not in _BRANDS)


@cache
def _by_name() -> Mapping[str, Gpu]:
    text = resources.files("spikeprof.profiler").joinpath("hardware.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
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
