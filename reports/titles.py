"""What metrics, columns and classes are called on screen: the words that ``format.py`` uses."""

from __future__ import annotations

#: Words of names that are written in capitals.
SPELLED = {
    w.lower(): w
    for w in "CPU CUDA HW SW CUPTI DRAM GPU GPUs ID L2 NUMA NVLink NVLinks NVML PCIe SM UUID".split()  # noqa: SIM905
}

#: Classes of idle time: the name, and what the GPU waited for.
IDLE_CLASSES = {
    "launch": ("launch", "the host is busy launching work"),
    "sync": ("sync", "the host waits for the GPU to finish"),
    "memcpy": ("memcpy", "the host is busy enqueueing copies"),
    "host": ("host", "the program does other work on the host"),
    "loading": ("loading", "the driver loads or compiles code"),
    "dependency": ("dependency", "work waits for another stream or a copy"),
    "device": ("device", "the GPU itself between queued work"),
    "cupti_overhead": ("CUPTI", "time that CUPTI says it took itself"),
    "unknown": ("unknown", "the launching call is not known"),
}
_IDLE = {key: name[0].upper() + name[1:] for key, (name, _) in IDLE_CLASSES.items()}
_IDLE |= {"memcpy": "Copy", "unknown": "Unexplained"}

_LINKS = {
    "nvlink_sent": "NVLink sent",
    "nvlink_received": "NVLink received",
    "pcie_read": "PCIe read",
    "pcie_written": "PCIe written",
}

#: Titles of metrics whose name alone would not read well. All others are made from the name.
METRIC_TITLES: dict[str, str] = {
    "busy_ns": "Busy time",
    "busy_share": "GPU busy",
    "device": "GPU",
    "devices_count": "GPUs",
    "dropped_count": "Records dropped",
    "gpu_time_share": "Share of kernel time",
    "graph_node_id": "Graph node",
    "fixed_in": "Fixed in",
    "l2_bytes": "L2 cache",
    "libcupti_version": "libcupti",
    "mem_busy_share": "Memory busy",
    "mem_bytes": "Memory",
    "mem_clock_mhz": "Memory clock",
    "mem_peak_bytes_per_s": "Peak bandwidth",
    "mem_used_bytes": "Memory used",
    "memory_ops_count": "Copies and memsets",
    "parent_pid": "Parent",
    "peak_source": "Source of the peak",
    "pid": "PID",
    "python_version": "Python",
    "ranks": "Processes",
    "sm_arch": "Architecture",
    "sm_count": "SMs",
    "gaps_count": "Gaps",
    "idle_host_after_sync_ns": "Host idle after a sync",
    "part_of_idle_share": "Share of idle time",
    "processes_count": "Processes",
    "tiny_in_graphs_share": "Tiny kernels launched by graphs",
    "idle_ns": "Idle time",
    **{f"idle_{key}_{unit}": f"{name} idle" for unit in ("ns", "share") for key, name in _IDLE.items()},
    "idle_without_cupti_share": "Idle without CUPTI's part",
    "median_gap_ns": "Median gap",
    "longest_part_of_gap_ns": "Longest part of a gap",
    "median_part_of_gap_ns": "Median part of a gap",
    "idle_share": "GPU idle",
    "known_origin_share": "GPU time of known origin",
    "launches_count": "Launches",
    "max_ns": "Longest",
    "mean_ns": "Mean",
    "min_ns": "Shortest",
    "p50_ns": "p50",
    "p90_ns": "p90",
    "p99_ns": "p99",
    "p99_over_p50_ratio": "p99 over p50",
    "rank": "Process",
    "records_count": "Records",
    "recorded_share": "Share of the time recorded",
    "repaired_count": "Records repaired",
    "samples_count": "Executions",
    "set_aside_count": "Records set aside",
    "start_ns": "At",
    "step_traced_ns": "Step with tracing",
    "step_untraced_ns": "Step without tracing",
    "tiny_kernels_count": "Tiny kernels",
    "tiny_launches_share": "Tiny kernels' share of launches",
    "tiny_time_share": "Tiny kernels' share of kernel time",
    "total_ns": "Total",
    "wall_ns": "Active time",
    **{f"{key}_mean_share": name for key, name in _LINKS.items()},
    **{f"{key}_busiest_share": f"{name}, busiest slice" for key, name in _LINKS.items()},
    "busiest_bytes_per_s": "Busiest slice",
    "busiest_share": "Busiest slice's share of the link's rate",
    "high_bytes": "At most",
    "launch_bytes": "Bytes per launch",
    "link_share": "Share of the link's rate",
    "low_bytes": "At least",
    "mean_bytes_per_s": "Mean rate",
    "mean_share": "Mean share of the link's rate",
    "measured_bytes_per_s": "Measured rate",
    "measured_share": "Measured share of the theoretical rate",
    "saturated_time_share": "Time near the link's rate",
    "wall_share": "Share of the active time",
}
