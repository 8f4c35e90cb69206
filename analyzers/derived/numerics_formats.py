"""What number formats can hold: ``numerics_formats.toml``, each limit with its source.

Headroom is log2(largest / amax): how often the largest magnitude can double before it does not fit. It is not known of
formats that are not in the table, and means nothing for integer codes, whose scale is chosen to fill them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Other names that formats go by.
_ALIASES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
            "double": "float64", "float8_e4m3": "float8_e4m3fn", "qint8": "int8", "quint8": "uint8"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Format:
    """One number format. Magnitudes without unit; of integers they are codes, and there is nothing subnormal."""

    name: str
    kind: str  # float or integer
    codes_bits: int
    largest: float
    scaled: bool
    source: str
    lowest: float | None = None
    smallest_normal: float | None = None
    smallest: float | None = None
    has_inf: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether elements are codes of a quantised tensor."""
        return self.kind == "integer"


@cache
def formats() -> dict[str, Format]:
    """Every known format by the name that torch gives it, without ``torch.``."""
    text = resources.files("spikeprof.analyzers.derived").joinpath("numerics_formats.toml").read_text("utf-8")
    data = tomllib.loads(text)
    return {
        name: Format(name, **{**entry, "source": data["sources"][entry["source"]]})
        for name, entry in data["formats"].items()
    }


def format_of(dtype: str) -> Format | None:
    """The format that a tensor's dtype is of; None for one that is not in the table."""
    name = dtype.removeprefix("torch.")
    return formats().get(_ALIASES.get(name, name))


def limits(dtypes: Sequence[str], fp16_limit: float) -> Floats:
    """The largest finite magnitude of each dtype, NaN where it is not known, of fp16 the given one."""
    known = [format_of(dtype) for dtype in dtypes]
    return np.array(
        [np.nan if one is None else fp16_limit if one.name == "float16" else one.largest for one in known], np.float64
    )


def headroom_bits(amax: Floats, limit: Floats) -> Floats:
    """log2(limit / amax): infinite for a tensor of zeros, NaN where one of the two is not known."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(limit) - np.log2(amax)
