"""Kernel time by class of module, here and by torch.profiler.

Of recordings of ``gpu/owned_programs.py``, those made now on a GPU and those in ``sample_traces``.
"""

from __future__ import annotations

import pandas as pd
import pytest

from spikeprof.profiler.trace import Trace


def shares_by_class(trace: Trace) -> dict[str, float]:
    """Of the time of kernels that a module owns itself, the share of each class of modules."""
    owned = _owned(trace)
    total = (owned.end_ns - owned.start_ns).groupby(owned.class_name.astype(str)).sum()
    return dict(total / total.sum())


def launches_by_class(trace: Trace) -> dict[str, int]:
    """Kernels that the modules of each class own themselves."""
    return dict(_owned(trace).class_name.astype(str).value_counts())


def _owned(trace: Trace) -> pd.DataFrame:
    kernels, owners, origins, modules = (
        trace.table(name).to_pandas() for name in ("kernels", "kernel_owners", "origins", "modules")
    )
    owned = kernels[["kernel_id", "start_ns", "end_ns"]].merge(owners, on="kernel_id")
    owned = owned.merge(origins[["origin_id", "module_id"]], on="origin_id")
    return owned.merge(modules[["module_id", "class_name"]], on="module_id")


def check_shares(ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Within 2 % for each class."""
    assert set(ours) == {"Block", "Linear", "LayerNorm", "Mlp"} <= set(theirs), (ours, theirs)
    for name, share in ours.items():
        assert share == pytest.approx(theirs[name], rel=0.02), (name, ours, theirs)
