"""The hardware counters that spikeprof knows by name: what each is, and how PM sampling is asked for it.

A metric of the trace is either a *sum* (a count within a sampling interval, additive over time: bytes, sectors) or a
*mean* (an average over the interval, additive once multiplied by its time). Rates of rates are not kept: a hit rate
is stored as the hits it stands for, ``source × times × scale``, and divided again only where it is shown.

CUPTI's metric names and what they count: NVIDIA's Nsight Compute documentation, "Metrics Reference".
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from spikeprof.profiler.errors import UsageError


@dataclass(frozen=True, slots=True)
class CounterMetric:
    """One counter. ``name`` ends in its unit; ``source`` is CUPTI's name for PM sampling.

    The value of an interval is ``source × scale``, or ``source × times × scale`` where ``times`` names a second
    metric of CUPTI's. ``additive``: a sum; otherwise a mean.
    """

    name: str
    source: str
    doc: str
    times: str = ""
    scale: float = 1.0
    additive: bool = True

    @property
    def sources(self) -> tuple[str, ...]:
        """CUPTI's metrics that it takes."""
        return (self.source, self.times) if self.times else (self.source,)


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric of one GPU. A sum has a ``total`` over the sampled time and is otherwise per second; a mean is not.

    ``highest`` is the largest value of a millisecond that was sampled.
    """

    device: int
    metric: str
    sampled_ns: int
    total: float | None
    mean: float
    highest: float


_METRICS = (
    CounterMetric("l2_sectors_count", "lts__t_sectors.sum", "32-byte sectors looked up in L2, reads and writes"),
    CounterMetric(
        "l2_hit_sectors_count",
        "lts__average_t_sector_hit_rate_realtime.pct",
        "of these, found in L2: the rest were filled, below 0 where fills fetch more than was looked up",
        times="lts__t_sectors.sum",
        # CUPTI's figure is 50 % on a GH100 when every sector hits, and half of the replayed rate elsewhere.
        scale=0.02,
    ),
    CounterMetric("dram_read_bytes", "dram__bytes_read.sum", "bytes read from DRAM"),
    CounterMetric("dram_written_bytes", "dram__bytes_write.sum", "bytes written to DRAM"),
    CounterMetric("l1_sectors_count", "l1tex__t_sectors.sum", "32-byte sectors looked up in L1"),
    CounterMetric("l1_hit_sectors_count", "l1tex__t_sectors_lookup_hit.sum", "of these, found in L1"),
    CounterMetric("pcie_read_bytes", "pcie__read_bytes.sum", "bytes that the GPU read over PCIe"),
    CounterMetric("pcie_written_bytes", "pcie__write_bytes.sum", "bytes that the GPU wrote over PCIe"),
    CounterMetric("nvlink_sent_bytes", "nvltx__bytes_data_user.sum", "payload sent over NVLink"),
    CounterMetric("nvlink_received_bytes", "nvlrx__bytes_data_user.sum", "payload received over NVLink"),
    CounterMetric(
        "sm_active_share",
        "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
        "share of SM cycles with at least one warp",
        scale=0.01,
        additive=False,
    ),
    CounterMetric(
        "tensor_active_share",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "share of cycles in which the tensor pipes work",
        scale=0.01,
        additive=False,
    ),
    CounterMetric("instructions_count", "sm__inst_executed_realtime.sum", "warp instructions executed"),
    CounterMetric(
        "shared_conflicts_count",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
        "extra shared-memory cycles due to bank conflicts",
    ),
    CounterMetric(
        "shared_wavefronts_count",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
        "shared-memory cycles, conflicts included",
    ),
)

#: Every metric by name.
METRICS: dict[str, CounterMetric] = {metric.name: metric for metric in _METRICS}

#: What ``--counters`` without a value asks for.
DEFAULT_SET = "memory"

#: What ``--counters=SET`` asks for.
SETS: dict[str, tuple[str, ...]] = {
    "memory": (
        "l2_sectors_count",
        "l2_hit_sectors_count",
        "dram_read_bytes",
        "dram_written_bytes",
        "l1_sectors_count",
        "l1_hit_sectors_count",
        "sm_active_share",
        "instructions_count",
    ),
    "compute": ("sm_active_share", "tensor_active_share", "instructions_count"),
    "nvlink": ("nvlink_sent_bytes", "nvlink_received_bytes", "pcie_read_bytes", "pcie_written_bytes"),
    "bank-conflicts": ("shared_conflicts_count", "shared_wavefronts_count", "sm_active_share"),
}


def metrics_of(text: str) -> tuple[str, ...]:
    """The metrics that ``--counters=TEXT`` asks for: names of sets, of metrics of ours or of CUPTI's, comma separated.

    Raises UsageError for a name that cannot be one, with the nearest that can.
    """
    found: dict[str, None] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word in SETS:
            found.update(dict.fromkeys(SETS[word]))
        elif word in METRICS or "__" in word:  # CUPTI's own are looked up where its library is
            found[word] = None
        else:
            near = difflib.get_close_matches(word, [*SETS, *METRICS], 3)
            meant = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise UsageError(f"--counters={text}: there is no set or metric {word!r}{meant}; sets: {', '.join(SETS)}")
    if not found:
        raise UsageError(f"--counters={text!r} names nothing; sets: {', '.join(SETS)}")
    return tuple(found)


#: Time between samples that PM sampling was seen to take on H200, and that is of use.
INTERVAL_NS_LIMITS = (1_000, 10_000_000)


def check_interval(interval_ns: int) -> None:
    """Raise UsageError for a time between samples that is out of range."""
    low, high = INTERVAL_NS_LIMITS
    if not low <= interval_ns <= high:
        raise UsageError(
            f"--counters-interval-us {interval_ns / 1000:g}: must be from {low / 1000:g} to {high / 1000:g}"
        )


def is_additive(name: str) -> bool:
    """Whether a metric's values add up over time; CUPTI's own names say so by ``.sum``."""
    known = METRICS.get(name)
    return known.additive if known else name.endswith(".sum")
