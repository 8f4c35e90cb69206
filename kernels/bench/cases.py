"""All cases, in the order of the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from spikeprof.kernels.bench import cases_attention, cases_fused, cases_memory
from spikeprof.kernels.bench.case import Case, NotMeasured

_MODULES = (cases_memory, cases_fused, cases_attention)


def cases(device: torch.device, small: bool, names: Sequence[str] = ()) -> list[Case | NotMeasured]:
    """Cases for this device, those whose kernel's name begins with one of ``names``; without names all.

    ``small`` shapes are for the CPU and for tests. Raises ValueError for a name that no kernel has.
    """
    made = list(_all(device, small))
    for name in names:
        if not any(case.kernel.startswith(name) for case in made):
            known = ", ".join(dict.fromkeys(case.kernel for case in made))
            raise ValueError(f"name is {name!r}: it can be {known}")
    return [case for case in made if not names or case.kernel.startswith(tuple(names))]


def _all(device: torch.device, small: bool) -> Iterator[Case | NotMeasured]:
    for module in _MODULES:
        yield from module.cases(device, small)
