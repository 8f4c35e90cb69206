"""Every kind of fault in every format is found, in the right module, eager and compiled; sound tensors are passed."""

from __future__ import annotations

import pytest
import torch
from fault_matrix import Fault, Gives, Three, check, faults, said

import spikeprof


@pytest.mark.parametrize("fault", faults(), ids=str)
def test_eager(way: str, fault: Fault) -> None:
    model = Three(fault, "cpu")
    with torch.no_grad(), spikeprof.watch(model) as watched:
        model()
        assert said(watched).findings == ()
        fault.put(model.faulty.base)
        model()
    check(fault, watched)


@pytest.mark.parametrize("fault", [fault for fault in faults() if fault.view == "whole"], ids=str)
def test_compiled(fault: Fault) -> None:
    """Of a compiled model what it gives is looked at, as a whole."""
    model = Three(fault, "cpu", copies=True)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), spikeprof.watch(compiled) as watched:
        compiled()
        fault.put(model.faulty.base)
        compiled()
    check(fault, watched, module="(model)")


def test_one_of_ten_million() -> None:
    fault = Fault("nan", "overflow", "float16")
    model = Gives(fault, "cpu", copies=False)
    model.base = torch.ones(10_000_019, dtype=torch.float16)
    with torch.no_grad(), spikeprof.watch(model) as watched:
        model()
        fault.put(model.base)
        model()
    check(fault, watched, module="(model)")
