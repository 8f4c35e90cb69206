"""Which module, operator and line of the program the GPU's time belongs to, and for how much of it that is known.

Python is asked where launches come from during a few steps and while graphs are captured; other launches have the
origin of the same place in the same sequence of kernels (``match``: position) or of the one place with that kernel and
grid (signature). Times are sums over kernels, those of concurrent ones counted each; copies and memsets have no owner.

low-ownership
-------------
What it means: for much of the kernel time no module of the model is known: tables by module, operator and line show
only a part, and what is missing need not be like what is there.

How it is found: kernels whose origin has a module, or was seen to be outside of any (it has a line, and no module was
being called), take less than ``min_owned_share`` of all kernel time.

What to do: where the rest is launched one by one, attribute more steps, and steps of every kind; where it is launched
by CUDA graphs, record from before they are captured. Whose work outside of modules is, the table of lines tells.

dominant-module
---------------
What it means: one part of the model takes most of the GPU's time: improving any other cannot help much.

How it is found: the smallest part of the model with more than ``dominant_share`` of all kernel time, modules that are
alike taken together; a whole model, or its list of layers, does not count.

What to do: study its operators and kernels first.

uneven-modules
--------------
What it means: of modules that are alike and launch equally many kernels, one takes much longer than the others, as a
layer does that gets other inputs, other kernels or other work beside it.

How it is found: among at least ``min_alike_count`` modules of one process that are alike and launched as many kernels
each, one takes more than ``uneven_ratio`` times the median, and what is above it is at least ``min_excess_share`` of
all kernel time.

What to do: compare the kernels and shapes of that module with those of its like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from spikeprof.analyzers.base import Evidence, Figure, Finding, Info, Metric, Result, Rule, Saving
from spikeprof.analyzers.derived.icicle import icicle
from spikeprof.analyzers.derived.intervals import Bools, Ints, ints
from spikeprof.analyzers.derived.kernel_origins import MATCHES
from spikeprof.analyzers.derived.module_tree import ModuleTree, module_tree
from spikeprof.analyzers.derived.owned import owned
from spikeprof.analyzers.derived.owned_tables import (
    Columns,
    Study,
    by_inputs,
    by_kernel,
    by_line,
    by_module,
    by_operator,
)
from spikeprof.profiler.trace import Trace

_COLLECT = "spikeprof run -- CMD"
_IMPORT = "torch.profiler with activities=[CPU, CUDA], record_shapes=True, with_stack=True"


@dataclass(frozen=True)
class Ownership:
    """Options: sizes of the tables, and the limits of the rules."""

    modules_count: int = 200
    ops_count: int = 50
    lines_count: int = 50
    kernels_count: int = 20
    cells_count: int = 300
    min_cell_share: float = 0.002
    min_owned_share: float = 0.9
    dominant_share: float = 0.5
    min_alike_count: int = 4
    uneven_ratio: float = 1.5
    min_excess_share: float = 0.01
    max_findings_count: int = 3  # of one rule

    info: ClassVar[Info] = Info(
        id="ownership",
        question="Which module, operator and line does the GPU's time belong to?",
        needs=("kernels",),
        wants=("kernel_owners", "origins", "modules", "stacks"),
        rules=(
            Rule("low-ownership", "The module of much of the GPU time is not known", "info"),
            Rule("dominant-module", "One part of the model takes most of the GPU time", "info"),
            Rule("uneven-modules", "One of several like modules takes much longer", "warning"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. ``not_measured`` where no launch was attributed, ``not_applicable`` without kernels."""
        if not trace.table("kernels").num_rows:
            return Result(self.info.id, "not_applicable", reason="no kernel ran while recording")
        imported = trace.manifest.source != "spikeprof"
        if "kernel_owners" not in trace or "origins" not in trace:
            return Result(
                self.info.id, "not_measured", reason=_why_not(trace), collect_with=_IMPORT if imported else _COLLECT
            )
        found = owned(trace)
        study = Study.of(found, module_tree(trace))
        modules = by_module(study, self.modules_count)
        findings = (
            *self._low(trace, study),
            *self._dominant(study),
            *self._uneven(study),
        )
        tables = {
            "modules": modules,
            "operators": by_operator(study, self.ops_count),
            "inputs": by_inputs(study, self.ops_count),
            "lines": by_line(study, trace, self.lines_count),
            "kernels": by_kernel(study, self.kernels_count),
            "matches": _by_match(study),
            "icicle": icicle(study, self.min_cell_share, self.cells_count),
        }
        return Result(
            self.info.id,
            "findings" if findings else "ok",
            metrics=_metrics(trace, study),
            findings=findings,
            tables=tables,
            figures=(Figure("ownership-icicle", "icicle", "icicle", x="cell_id", y="parent_id", value="total_ns"),),
        )

    def _low(self, trace: Trace, study: Study) -> list[Finding]:
        recorded, found = trace.manifest.source == "spikeprof", study.found
        inside = study.module >= 0
        outside = ~inside & (found.of_pairs(found.stack) >= 0) & recorded
        share, outside_share = _share(study, inside), _share(study, outside)
        known = share + outside_share
        if "modules" not in trace or not study.whole_ns or known >= self.min_owned_share:
            return []
        lost = np.append(found.module, -1)[found.origin] < 0
        if recorded:
            lost &= np.append(found.stack, -1)[found.origin] < 0
        in_graphs = int(found.length[lost & found.in_graph].sum()) / study.whole_ns
        evidence = (
            Evidence("owned_module_share", share, self.min_owned_share, "min_owned_share"),
            *((Evidence("outside_modules_share", outside_share),) if outside_share else ()),
            Evidence("unowned_in_graphs_share", in_graphs),
            Evidence("unowned_launched_share", 1 - known - in_graphs),
        )
        if not recorded:
            action = "Record with torch.profiler's with_stack=True, which adds the modules."
        elif in_graphs > (1 - known) / 2:
            action = "Record from before the CUDA graphs are captured: who launched their kernels is known only then."
        else:
            action = "Attribute more steps (--attribute-steps), so that every kind of step is among them."
        return [Finding("low-ownership", "info", {}, evidence, action)]

    def _dominant(self, study: Study) -> list[Finding]:
        tree, pairs = study.tree, study.found.pairs
        whole = _inclusive(study, pairs.total)
        of_group = tree.by_group(whole)
        large = of_group > self.dominant_share * study.whole_ns
        parts = [
            i
            for i in np.flatnonzero(large).tolist()
            if tree.groups[i].parent >= 0
            and not _is_list(tree, i)
            and not any(large[j] and tree.groups[j].parent == i for j in range(len(tree.groups)))
        ]
        return [
            Finding(
                "dominant-module",
                "info",
                {"module": tree.groups[i].label},
                (
                    Evidence(
                        "gpu_time_share", int(of_group[i]) / study.whole_ns, self.dominant_share, "dominant_share"
                    ),
                    Evidence("total_ns", int(of_group[i])),
                    Evidence("modules_count", len(tree.groups[i].members)),
                ),
                "Study the operators and kernels of this part first.",
            )
            for i in parts[:1]
        ]

    def _uneven(self, study: Study) -> list[Finding]:
        tree, pairs = study.tree, study.found.pairs
        time, launches = _inclusive(study, pairs.total), _inclusive(study, pairs.launches)
        found: list[tuple[int, int, float, int]] = []  # excess, module, ratio, median
        for like in _alike(tree):
            members = like[launches[like] > 0]
            if len(members) < self.min_alike_count:
                continue
            usual = int(np.partition(launches[members], len(members) // 2)[len(members) // 2])
            alike = members[launches[members] == usual]
            if len(alike) < self.min_alike_count:
                continue
            median = int(np.partition(time[alike], (len(alike) - 1) // 2)[(len(alike) - 1) // 2])
            worst = int(alike[np.argmax(time[alike])])
            excess = int(time[worst]) - median
            if median and time[worst] > self.uneven_ratio * median and excess >= self.min_excess_share * study.whole_ns:
                found.append((excess, worst, int(time[worst]) / median, median))
        # What a part of a layer has too much, the layer has too: the smallest part tells most.
        inner = {int(tree.parent_of[module]) for _, module, *_ in found}
        kept = sorted((f for f in found if f[1] not in inner), key=lambda f: -f[0])
        return [self._uneven_finding(study, *f) for f in kept[: self.max_findings_count]]

    def _uneven_finding(self, study: Study, excess: int, module: int, ratio: float, median: int) -> Finding:
        tree = study.tree
        group = tree.groups[int(tree.group_of[module])]
        evidence = (
            Evidence("over_median_ratio", ratio, self.uneven_ratio, "uneven_ratio"),
            Evidence("total_ns", median + excess),
            Evidence("median_ns", median),
            Evidence("excess_share", excess / study.whole_ns, self.min_excess_share, "min_excess_share"),
            Evidence("modules_count", len(group.members), self.min_alike_count, "min_alike_count"),
        )
        action = "Compare its kernels and the shapes of their inputs with those of its like."
        scope = {"module": tree.paths[module], "like": group.label}
        return Finding("uneven-modules", "warning", scope, evidence, action, Saving(excess, "total"))


def _alike(tree: ModuleTree) -> Iterator[Ints]:
    """Modules that are alike, of one process each."""
    for group in tree.groups:
        members = ints(group.members)
        for rank in np.unique(tree.ranks[members]).tolist():
            yield members[tree.ranks[members] == rank]


def _is_list(tree: ModuleTree, number: int) -> bool:
    """Whether a group is the list of a model's layers: ``layers.*``, or right below the root with parts of its own."""
    group = tree.groups[number]
    layers = group.depth == 1 and group.path.endswith("_*") and any(g.parent == number for g in tree.groups)
    return layers or group.path.rpartition(".")[2] == "*"


def _why_not(trace: Trace) -> str:
    """Why nothing is known of owners."""
    for table in ("kernel_owners", "origins"):
        if table in trace.damaged:
            return trace.damaged[table]
    if trace.manifest.source != "spikeprof":
        return "the file holds no operators and no modules: GPU work only was recorded"
    note = trace.manifest.collectors.get("ownership")
    if note is None:
        return "launches were not attributed in this recording"
    return note.reason or "no launch was attributed"


def _inclusive(study: Study, values: Ints) -> Ints:
    """Values of pairs, added up for each module and all below it."""
    inside = study.module >= 0
    own = np.bincount(study.module[inside], values[inside], minlength=len(study.tree.group_of))
    return study.tree.with_ancestors(ints(own))


def _share(study: Study, known: Bools) -> float:
    pairs = study.found.pairs
    return int(pairs.total[known].sum()) / study.whole_ns if study.whole_ns else 0.0


def _metrics(trace: Trace, study: Study) -> tuple[Metric, ...]:
    found = study.found
    shapes = np.array([text != "" for text in found.shapes], bool)
    with_shapes = np.append(shapes, False)[found.pairs.origin] & (study.op >= 0)
    whole = study.whole_ns
    why = "" if whole else "all kernels last 0 ns"
    no_modules = "" if "modules" in trace else trace.damaged.get("modules", "the file names no modules")
    no_stacks = "" if "stacks" in trace else trace.damaged.get("stacks", "the file holds no Python stacks")
    asked = (
        ("owned_module_share", study.module >= 0, why or no_modules),
        ("owned_op_share", study.op >= 0, why),
        ("owned_shapes_share", with_shapes, why),
        ("owned_line_share", found.of_pairs(found.stack) >= 0, why or no_stacks),
    )
    kinds = _by_match(study)
    return (
        Metric("kernel_time_ns", whole),
        *(Metric(name, None if no else _share(study, known), no) for name, known, no in asked),
        *(
            Metric(f"{kind}_match_share", None if why else share, why)
            for kind, share in zip(kinds["match"], kinds["gpu_time_share"], strict=True)
        ),
    )


def _by_match(study: Study) -> Columns:
    """How kernels came by their origins."""
    found = study.found
    total = ints(np.bincount(found.match, found.length, minlength=len(MATCHES)))
    launches = ints(np.bincount(found.match, minlength=len(MATCHES)))
    return {
        "match": list(MATCHES),
        "launches_count": launches.tolist(),
        "total_ns": total.tolist(),
        "gpu_time_share": study.share(total.tolist()),
    }
