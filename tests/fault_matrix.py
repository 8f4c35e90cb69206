"""Faults of every kind in every format, put into one of three modules, and what must be said of each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scanned import asked
from torch import nn

from spikeprof.analyzers.base import Result
from spikeprof.profiler.watching import Watch

FLOATS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
CODES = ("int8", "uint8")
ENDS = {"int8": (-128, 127), "uint8": (0, 255)}

#: Elements of a tensor: no multiple of what a program of the scan takes.
ODD = 4099
PLACES = {"first": 0, "in the middle": 2058, "last": ODD - 1}

VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda base: base,
    "not aligned": lambda base: base[1:],
    "transposed": lambda base: base[:4096].view(32, 128).t(),
    "sliced": lambda base: base[:4096].view(32, 128)[1:32, 3:127],
}


@dataclass(frozen=True)
class Fault:
    """What is put in, where, and the rule that must tell of it."""

    what: str
    rule: str
    dtype: str
    place: str = "in the middle"
    view: str = "whole"

    def __str__(self) -> str:
        return "-".join((self.what, self.dtype, self.place, self.view)).replace(" ", "_")

    def put(self, base: Any) -> None:
        """Spoil the tensor that all views are of."""
        at, dtype = PLACES[self.place], base.dtype
        if self.what == "saturated":
            ends = ENDS.get(self.dtype) or (torch.finfo(dtype).max,)
            base[at : at + len(base) // 40] = torch.tensor(ends[-1], dtype=dtype, device=base.device)
            return
        values = {"nan": math.nan, "inf": math.inf, "near": 0.0}
        value = torch.finfo(dtype).max * 0.75 if self.what == "near" else values[self.what]
        base[at] = torch.tensor(value, dtype=torch.float64).to(dtype).to(base.device)


def faults() -> list[Fault]:
    """Kinds by formats at their place in the middle; places and views in turn for three formats."""
    found = []
    for dtype in FLOATS:
        found.append(Fault("nan", "overflow", dtype))
        if dtype != "float8_e4m3fn":  # has no infinity
            found.append(Fault("inf", "overflow", dtype))
        found.append(Fault("saturated" if "float8" in dtype else "near", "near-overflow", dtype))
    found += [Fault("saturated", "int8-saturation", dtype, "in the middle") for dtype in CODES]
    for dtype in ("float16", "float32", "float8_e5m2"):
        found += [Fault("inf", "overflow", dtype, place) for place in PLACES if place != "in the middle"]
        found += [Fault("nan", "overflow", dtype, view=view) for view in VIEWS if view != "whole"]
    return found


class Gives(nn.Module):
    """A module that gives a view of a tensor which stays where it is; ``copies``: or a copy of it."""

    def __init__(self, fault: Fault, device: str, copies: bool) -> None:
        super().__init__()
        self.view, self.copies = VIEWS[fault.view], copies
        drawn = torch.arange(ODD) % 50 + 1
        dtype = getattr(torch, fault.dtype)
        self.base = (drawn / 25 if dtype.is_floating_point else drawn).to(dtype).to(device)

    def forward(self) -> Any:
        """What was asked for."""
        return self.base.clone() if self.copies else self.view(self.base)


class Three(nn.Module):
    """Sound, the one with the fault, sound; gives what the second gave."""

    def __init__(self, fault: Fault, device: str, copies: bool = False) -> None:
        super().__init__()
        self.before, self.faulty, self.after = (Gives(fault, device, copies) for _ in range(3))

    def forward(self) -> Any:
        """Run all three."""
        self.before()
        made = self.faulty()
        self.after()
        return made


def check(fault: Fault, watched: Watch, module: str = "faulty") -> None:
    """That the fault was found, in the right module, and nothing else was."""
    result = said(watched)
    expected = {fault.rule, "nan-origin"} if fault.rule == "overflow" else {fault.rule}
    assert {finding.rule for finding in result.findings} == expected
    assert {finding.scope["module"] for finding in result.findings} == {module}
    assert {finding.scope["step"] for finding in result.findings} == {1}


def said(watched: Watch) -> Result:
    """What the analyzer says of all scans so far."""
    assert watched.remarks == []
    return asked(*watched.stats())
