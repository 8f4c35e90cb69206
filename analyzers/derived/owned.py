"""Kernel time by where it comes from: origins, modules and stacks joined to kernels, added up per origin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spikeprof.analyzers.derived.groups import first_of_groups, group_codes
from spikeprof.analyzers.derived.intervals import Integers, Ints, ints
from spikeprof.analyzers.derived.kernel_origins import kernel_origins, referred
from spikeprof.profiler.trace import Trace, coded


@dataclass(frozen=True)
class Owned:
    """The kernels that do not end before they start, one element each, and the origins behind them.

    ``origin`` is -1 where none is known. ``match`` holds places in ``kernel_origins.MATCHES``.
    """

    length: Ints
    origin: Ints
    match: Integers
    name: Integers
    names: list[str]
    in_graph: Integers
    module: Ints  # of each origin, as are op and stack; -1 = not known
    op: Ints
    stack: Ints
    ops: list[str]
    shapes: list[str]
    dtypes: list[str]

    @cached_property
    def pairs(self) -> Pairs:
        """Kernel time per origin and kernel name."""
        codes, count = group_codes(self.origin, self.name)
        first = first_of_groups(codes, count)
        return Pairs(
            origin=self.origin[first],
            name=ints(self.name[first]),
            launches=ints(np.bincount(codes, minlength=count)),
            total=ints(np.bincount(codes, self.length, minlength=count)),
        )

    def of_pairs(self, column: Ints) -> Ints:
        """A column of origins for each pair, -1 where its origin is not known."""
        return np.append(column, -1)[self.pairs.origin]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Launches and kernel time (ns) of each combination of origin (-1 = not known) and kernel name."""

    origin: Ints
    name: Ints
    launches: Ints
    total: Ints


def owned(trace: Trace) -> Owned:
    """Join them. Rows that name an origin, module or stack that is not there count as not known."""
    start, end = trace.column("kernels", "start_ns"), trace.column("kernels", "end_ns")
    rows = np.flatnonzero(end >= start)
    names, labels = trace.codes("kernels", "name")
    in_graph = (trace.column("kernels", "graph_id") != 0) | (trace.column("kernels", "graph_node_id") != 0)
    origins = trace.table("origins")
    origin, match = kernel_origins(trace)
    ops, op_labels = coded(origins.column("op"))
    return Owned(
        length=(end - start)[rows],
        origin=origin[rows],
        match=match[rows],
        name=names[rows],
        names=labels,
        in_graph=in_graph[rows],
        module=referred(trace, "module_id", "modules"),
        op=ints(ops),
        stack=referred(trace, "stack_id", "stacks"),
        ops=op_labels,
        shapes=origins.column("input_shapes").to_pylist(),
        dtypes=origins.column("input_dtypes").to_pylist(),
    )
