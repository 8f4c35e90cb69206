"""Which row of ``origins`` each kernel belongs to, and what that row refers to."""

from __future__ import annotations

import numpy as np

from spikeprof.analyzers.derived.intervals import Integers, Ints, ints
from spikeprof.profiler.trace import Trace

#: How a kernel came by its origin, see the table ``kernel_owners``.
MATCHES = ("exact", "graph", "position", "signature", "none")
_NONE = MATCHES.index("none")


def kernel_origins(trace: Trace) -> tuple[Ints, Integers]:
    """(the row of ``origins`` of each row of ``kernels``, how it is known: places in ``MATCHES``).

    -1 and ``none`` where no row is known, as for all where a table is absent. A part of a recording keeps the ids of
    the whole.
    """
    kernel_ids = trace.column("kernels", "kernel_id")
    owners = trace.column("kernel_owners", "kernel_id") if "kernel_owners" in trace else ints([])
    if not len(owners) or "origins" not in trace:
        return np.full(len(kernel_ids), -1, np.int64), np.full(len(kernel_ids), _NONE, np.int8)
    order = slice(None) if np.all(owners[1:] >= owners[:-1]) else np.argsort(owners, kind="stable")
    place = np.minimum(np.searchsorted(owners[order], kernel_ids), len(owners) - 1)
    known = owners[order][place] == kernel_ids
    origin = ints(trace.column("kernel_owners", "origin_id"))[order][place]
    codes, labels = trace.codes("kernel_owners", "match")
    kinds = np.array([MATCHES.index(text) if text in MATCHES else _NONE for text in labels], np.int8)
    known &= (origin >= 0) & (origin < trace.table("origins").num_rows)
    return np.where(known, origin, -1), np.where(known, kinds[codes[order][place]], _NONE)


def referred(trace: Trace, column: str, table: str) -> Ints:
    """Of each origin the row of another table that a column names, -1 for those that it does not have."""
    values = ints(trace.column("origins", column))
    count = trace.table(table).num_rows if table in trace else 0
    return np.where((values >= 0) & (values < count), values, -1)


def operators(trace: Trace) -> list[str]:
    """The operator of each origin, empty where it is not known."""
    return [name or "" for name in trace.table("origins").column("op").to_pylist()]
