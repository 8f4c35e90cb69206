"""How the GPUs are joined: links and their rates, what parallelism they suit, how much of them was used.

Theoretical rates are payload in one direction; each row of the table ``topology`` names its source. A *level* of
tensor parallelism doubles the group of GPUs that split a layer, one exchange of a recursive-doubling all-reduce: 3
levels are groups of 8. How many the links suit is a rule of thumb by what all NVLinks of a GPU carry in both
directions together: 3 from ``three_level_bytes_per_s`` (NVLink 4 with 18 links), 2 from ``two_level_bytes_per_s``
(NVLink 3 with 12 links), 1 below; 1 on PCIe where two GPUs reach each other's memory, else none: pipeline or data
parallelism exchanges less.

Link use comes from counters (``--counters=nvlink``), else from what GPM or NVML sampled. The busiest slice is that of
``bins_count`` equal ones over the time sampled. A kernel's share of a link is its bytes per launch over its mean
duration, against the link's rate.

slow-link
---------
What it means: copies over a link reach far less than its theoretical rate.

How it is found: the measured rate is less than ``min_measured_share`` of the theoretical one. Pairs without peer
access are left out: the driver copies for them through the host.

What to do: look for other traffic, a link that runs below its generation or width, and, on virtual machines, how the
GPU is passed through; measure again with `spikeprof topology --measure`.

no-peer-access
--------------
What it means: some GPUs cannot reach each other's memory; what they exchange goes through the host's memory.

How it is found: the driver's P2P status of a pair is not ok.

What to do: keep ranks that exchange much data on GPUs with peer access, or exchange less (pipeline or data
parallelism). Virtualisation (ACS, IOMMU), chipsets and consumer GPUs are common reasons.

pcie-below-maximum
------------------
What it means: a GPU's PCIe link runs with fewer lanes, or at a lower generation, than both of its ends can.

How it is found: the lanes in use are fewer than both ends have; or the generation, the higher of two readings, is
lower. An idle GPU lowers the generation to save power: unless a copy was measured to be slow, too, this alone is only
a note, and nothing at all where a measured copy reached ``min_measured_share`` of the full rate.

What to do: reseat the card, check the slot and the riser, and the link speed in the BIOS.

nvlinks-down
------------
What it means: some NVLinks of a GPU carry nothing while others do. Some boards do not wire all of them.

How it is found: the driver lists more links on the GPU than are active.

What to do: ask `nvidia-smi nvlink --status` and the kernel log for the reason.

split-numa
----------
What it means: the GPUs hang on several NUMA nodes: host memory and CPUs near one GPU are far from another.

How it is found: the kernel, or the driver, names more than one nearest node.

What to do: bind each rank's CPUs and memory to the node of its GPU (`numactl --cpunodebind=N --membind=N`).

link-saturated
--------------
What it means: a link was close to its rate for much of the time: it may set the pace.

How it is found: in at least ``min_saturated_time_share`` of the sampled time the link carried more than
``saturated_share`` of its theoretical rate, more than which copies seldom reach.

What to do: send less, or overlap the transfers with computing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spikeprof.analyzers.base import Evidence, Figure, Finding, Info, Metric, Result, Rule
from spikeprof.analyzers.derived.kernel_links import kernel_links
from spikeprof.analyzers.derived.link_use import LINKS, Columns, link_uses, use_tables
from spikeprof.analyzers.derived.links import HOST, Hierarchy, Links, Row, lowest
from spikeprof.profiler.trace import Trace

_COLUMNS = ("src_device", "dst_device", "kind", "pcie_path", "generation", "max_generation", "links_count",
            "max_links_count", "peer_access", "peak_bytes_per_s", "measured_bytes_per_s", "measured_reason",
            "peak_source")  # fmt: skip
_NOT_SAMPLED = "bytes over this link were not sampled"
_COUNT_WITH = "spikeprof run --counters=nvlink -- CMD"


@dataclass(frozen=True)
class Topology:
    """Options: sizes of the tables, and the limits of the rules."""

    bins_count: int = 120
    top_count: int = 20
    max_links_count: int = 1000  # rows of the table of links
    three_level_bytes_per_s: float = 900e9
    two_level_bytes_per_s: float = 600e9
    min_measured_share: float = 0.6
    saturated_share: float = 0.75
    min_saturated_time_share: float = 0.2
    max_findings_count: int = 3  # of one rule

    info: ClassVar[Info] = Info(
        id="topology",
        question="How are the GPUs joined, and does this machine suit the parallelism?",
        needs=("topology",),
        wants=("counter_samples", "samples", "kernels", "kernel_classes", "counters"),
        rules=(
            Rule("slow-link", "Copies over a link are far slower than its rate", "warning"),
            Rule("no-peer-access", "Some GPUs cannot reach each other's memory", "warning"),
            Rule("pcie-below-maximum", "A GPU's PCIe link runs below what both of its ends can", "warning"),
            Rule("nvlinks-down", "Some NVLinks of a GPU are down", "info"),
            Rule("split-numa", "The GPUs hang on several NUMA nodes", "info"),
            Rule("link-saturated", "A link runs close to its rate much of the time", "warning"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. ``not_applicable`` when the table names no GPU."""
        links = Links.of(trace)
        if not links.gpus:
            return Result(self.info.id, "not_applicable", reason="no GPU was seen")
        peaks = {(gpu, link): _peak(links, gpu, link) for gpu in links.gpus for link in LINKS}
        use, over_time = use_tables(link_uses(trace), peaks, self.bins_count, self.saturated_share)
        hierarchy = links.hierarchy(self.two_level_bytes_per_s, self.three_level_bytes_per_s)
        tables = {
            "gpus": _gpus(links),
            "hierarchy": self._hierarchy(hierarchy),
            "links": {c: [r[c] for r in links.rows[: self.max_links_count]] for c in _COLUMNS},
            "use": use,
            "use_over_time": over_time,
            "kernel_links": kernel_links(trace, peaks, self.top_count),
        }
        findings = (
            *self._slow(links),
            *_without_access(links),
            *self._pcie(links),
            *_down(links),
            *_numa(links),
            *self._saturated(use),
        )
        figures = (
            Figure("link-use", "line", "use_over_time", x="bin_start_ns", y="link_share", series="link"),
            Figure("links", "table", "links", x="dst_device", y="src_device", value="peak_bytes_per_s"),
        )
        metrics = (*_levels(links, hierarchy), *_use_metrics(links, use))
        return Result(
            self.info.id,
            "findings" if findings else "ok",
            collect_with=_COUNT_WITH if any(metric.reason == _NOT_SAMPLED for metric in metrics) else "",
            metrics=metrics,
            findings=findings,
            tables=tables,
            figures=figures,
        )

    def _hierarchy(self, found: Hierarchy | None) -> Columns:
        """One row with the limits that decided; none for a single GPU."""
        columns = ("fabric", "gpus", "both_ways_bytes_per_s", "levels_count", "group_gpus_count")
        limits = ("two_level_bytes_per_s", "three_level_bytes_per_s")
        if found is None:
            return {name: [] for name in (*columns, *limits)}
        row = {name: [getattr(found, name)] for name in columns} | {name: [getattr(self, name)] for name in limits}
        return row | {"gpus": [", ".join(map(str, found.gpus))]}

    def _slow(self, links: Links) -> list[Finding]:
        slow = [
            (row["measured_bytes_per_s"] / row["peak_bytes_per_s"], row)
            for row in links.rows
            if row["measured_bytes_per_s"] is not None and row["peak_bytes_per_s"] and row["peer_access"] in ("", "ok")
        ]
        slow = sorted((pair for pair in slow if pair[0] < self.min_measured_share), key=lambda pair: pair[0])
        return [
            Finding(
                "slow-link",
                "warning",
                _ends(row),
                (
                    Evidence("measured_share", share, self.min_measured_share, "min_measured_share"),
                    Evidence("measured_bytes_per_s", row["measured_bytes_per_s"]),
                    Evidence("peak_bytes_per_s", row["peak_bytes_per_s"], basis="modelled"),
                    Evidence("slow_links_count", len(slow)),
                ),
                "Look for other traffic on the link, and measure again (`spikeprof topology --measure`).",
            )
            for share, row in slow[: self.max_findings_count]
        ]

    def _pcie(self, links: Links) -> list[Finding]:
        rows = [row for gpu in links.gpus if (row := links.host(gpu))]
        found = [self._below(links, row) for row in rows]
        return [finding for finding in found if finding][: self.max_findings_count]

    def _below(self, links: Links, row: Row) -> Finding | None:
        lanes, generation = _fewer(row, "links_count"), _fewer(row, "generation")
        ways = (row, links.by_ends.get((row["dst_device"], row["src_device"]), row))
        reached = lowest([w["measured_bytes_per_s"] for w in ways])
        share = reached / row["peak_bytes_per_s"] if reached and row["peak_bytes_per_s"] else None
        if not lanes and (not generation or (share is not None and share >= self.min_measured_share)):
            return None
        whose = "the most that both ends can"
        evidence = []
        if lanes:
            evidence.append(Evidence("pcie_lanes_count", row["links_count"], row["max_links_count"], whose))
        if generation:
            evidence.append(Evidence("pcie_generation_id", row["generation"], row["max_generation"], whose))
        if share is not None:
            evidence.append(Evidence("measured_share", share, self.min_measured_share, "min_measured_share"))
        sure = lanes or share is not None
        action = "Check the slot, the riser and the BIOS setting of the link."
        asleep = "Measure it under load (`spikeprof topology --measure`): an idle GPU lowers the generation."
        return Finding(
            "pcie-below-maximum",
            "warning" if sure else "info",
            {"device": row["src_device"]},
            tuple(evidence),
            action if sure else asleep,
        )

    def _saturated(self, use: Columns) -> list[Finding]:
        rows = [dict(zip(use, values, strict=True)) for values in zip(*use.values(), strict=True)]
        full = [row for row in rows if (row["saturated_time_share"] or 0) >= self.min_saturated_time_share]
        full.sort(key=lambda row: -row["saturated_time_share"])
        limit, option = self.min_saturated_time_share, "min_saturated_time_share"
        return [
            Finding(
                "link-saturated",
                "warning",
                {"device": row["device"], "link": row["link"].removesuffix("_bytes")},
                (
                    Evidence("saturated_time_share", row["saturated_time_share"], limit, option),
                    Evidence("mean_share", row["mean_share"]),
                    Evidence("mean_bytes_per_s", row["mean_bytes_per_s"]),
                    Evidence("peak_bytes_per_s", row["peak_bytes_per_s"], basis="modelled"),
                ),
                "Send less over this link, or overlap the transfers with computing.",
            )
            for row in full[: self.max_findings_count]
        ]


def _levels(links: Links, hierarchy: Hierarchy | None) -> list[Metric]:
    metrics = [Metric("gpus_count", len(links.gpus))]
    if hierarchy:
        why = "" if hierarchy.levels_count is not None else "the driver does not tell how the GPUs are joined"
        metrics.append(Metric("tensor_parallel_levels_count", hierarchy.levels_count, why))
        metrics.append(Metric("tensor_parallel_gpus_count", hierarchy.group_gpus_count, why))
    return metrics


def _ends(row: Row) -> dict[str, str | int]:
    """The scope of a link."""
    if row["src_device"] == HOST:
        return {"device": row["dst_device"], "from": "host"}
    if row["dst_device"] == HOST:
        return {"device": row["src_device"], "to": "host"}
    return {"src_device": row["src_device"], "dst_device": row["dst_device"]}


def _peak(links: Links, device: int, link: str) -> float | None:
    """The rate of a link of a GPU in one direction; None when unknown, or there is no such link."""
    rate = links.nvlinks(device)[1] if link.startswith("nvlink") else links.pcie(device)
    return rate or None


def _fewer(row: Row, column: str) -> bool:
    """Whether what is in use is known to be less than what could be."""
    now, most = row[column], row[f"max_{column}"]
    return bool(now and most and now < most)


def _gpus(links: Links) -> Columns:
    """One row per GPU: its NUMA node, and what its links carry in one direction."""
    rows = []
    for gpu in links.gpus:
        host = links.host(gpu) or {}
        back = links.by_ends.get((HOST, gpu), {})
        count, rate = links.nvlinks(gpu)
        node = host.get("numa_node", -1)
        rows.append(
            {
                "device": gpu,
                "numa_node": node if node >= 0 else None,
                "nvlinks_count": count,
                "nvlink_bytes_per_s": rate,
                "pcie_generation_id": host.get("generation") or None,
                "pcie_lanes_count": host.get("links_count"),
                "pcie_bytes_per_s": host.get("peak_bytes_per_s"),
                "from_host_bytes_per_s": back.get("measured_bytes_per_s"),
                "to_host_bytes_per_s": host.get("measured_bytes_per_s"),
            }
        )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _use_metrics(links: Links, use: Columns) -> list[Metric]:
    """Mean and busiest share of each direction: of the GPU that used it most."""
    metrics = []
    for link in LINKS:
        if link.startswith("nvlink") and not any(links.nvlinks(gpu)[0] != 0 for gpu in links.gpus):
            continue
        rows = [i for i, name in enumerate(use["link"]) if name == f"{link}_bytes"]
        for kind in ("mean", "busiest"):
            shares = [v for i in rows if (v := use[f"{kind}_share"][i]) is not None]
            if shares:
                metrics.append(Metric(f"{link}_{kind}_share", max(shares)))
            elif kind == "mean":
                why = "the rate of the link is not known" if rows else _NOT_SAMPLED
                metrics.append(Metric(f"{link}_mean_share", None, why))
    return metrics


def _without_access(links: Links) -> list[Finding]:
    refused = [row for row in links.pairs if row["peer_access"] not in ("", "ok")]
    if not refused:
        return []
    reasons = dict.fromkeys(row["peer_access"] for row in refused)
    evidence = (
        Evidence("pairs_without_access_count", len(refused), 0, "none expected"),
        Evidence("pairs_count", len(links.pairs)),
    )
    some = "Keep ranks that exchange much data on GPUs that reach each other's memory."
    none = "Prefer pipeline or data parallelism across these GPUs: they exchange less."
    action = none if len(refused) == len(links.pairs) else some
    return [Finding("no-peer-access", "warning", {"reason": "; ".join(reasons)}, evidence, action)]


def _down(links: Links) -> list[Finding]:
    found = []
    for gpu in links.gpus:
        rows = [r for r in links.pairs if r["src_device"] == gpu and r["kind"] in ("nvlink", "nvswitch")]
        missing = max((r["max_links_count"] - r["links_count"] for r in rows if _fewer(r, "links_count")), default=0)
        if missing:
            evidence = (
                Evidence("nvlinks_down_count", missing, 0, "none expected"),
                Evidence("nvlinks_count", links.nvlinks(gpu)[0] or 0),
            )
            action = "Ask `nvidia-smi nvlink --status` and the kernel log why."
            found.append(Finding("nvlinks-down", "info", {"device": gpu}, evidence, action))
    return found


def _numa(links: Links) -> list[Finding]:
    nodes = {row["numa_node"] for gpu in links.gpus if (row := links.host(gpu)) and row["numa_node"] >= 0}
    if len(nodes) < 2:
        return []
    evidence = (Evidence("numa_nodes_count", len(nodes), 1, "all GPUs on one node"),)
    action = "Bind each rank's CPUs and memory to its GPU's node (`numactl --cpunodebind=N --membind=N`)."
    return [Finding("split-numa", "info", {}, evidence, action)]
