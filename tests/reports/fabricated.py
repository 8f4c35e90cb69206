"""Reports made by hand, in the shapes that the analyzers return: rich, empty, all not measured, broken, hostile."""

from __future__ import annotations

from typing import Any

from spikeprof.analyzers.base import Evidence, Figure, Finding, Metric, Result, Saving
from spikeprof.profiler.trace import CollectorNote, Manifest
from spikeprof.reports.model import Report

GEMM = "nvjet_hsh_64x8_64x16_4x1_v_bz_TNT"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::Half>, std::array<char*, 3ul>)"
)
SILU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel("
    "at::TensorIteratorBase&)::{lambda()#1}::operator()() const::{lambda()#2}::operator()() const::"
    "{lambda(c10::Half)#1}, std::array<char*, 2ul> >(int, at::native::(anonymous namespace)::silu_kernel("
    "at::TensorIteratorBase&)::{lambda()#1}::operator()() const::{lambda()#2}::operator()() const::"
    "{lambda(c10::Half)#1}, std::array<char*, 2ul>)"
)
TRITON = "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1"
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<b>bold</b> & \"quoted\" 'too'",
    "\x1b[31mred\x1b[0m \u202egnp.exe\u2028next",
    "[bold red]markup[/] {{ 7*7 }} %{x} <a href='https://evil.example/'>",
    "-->]]><svg/onload=alert(2)>",
)
KERNELS = (GEMM, ADD, SILU, TRITON)


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "source": "spikeprof",
        "t0_unix_ns": 1_764_000_000_000_000_000,
        "duration_ns": 2_430_000_000,
        "command": ("python", "infer.py", "--prompt", "<b>hello</b> & bye"),
        "exit_code": 0,
        "host": "gpu-7",
        "versions": {"spikeprof": "0.1.0", "driver": "580.159.04", "libcupti": "130000", "torch": "2.11.0+cu130"},
        "collectors": {
            "activity": CollectorNote("ok", records_count=30_803, repaired_count=12, set_aside_count=3),
            "pm_sampling": CollectorNote("refused", "profiling is for administrators only on this driver"),
        },
        "options": {"clean_steps": "20"},
        "notes": ("The program was stopped by a signal.",),
    }
    return Manifest(**{**values, **changes})


def truth() -> Result:
    return Result(
        "truth",
        "findings",
        metrics=(
            Metric("step_untraced_ns", 5_520_000),
            Metric("step_traced_ns", 5_610_000),
            Metric("tracing_cost_share", 5_610_000 / 5_520_000 - 1),
            Metric("known_origin_share", 0.9993),
            Metric("kernels_count", 77_056),
            Metric("gpu_time_ns", 240_000_000),
            Metric("dropped_count", 0),
            Metric("repaired_count", 12),
            Metric("set_aside_count", 3),
            Metric("broken_records_count", 3),
            Metric("recorded_share", 0.924),
        ),
        findings=(
            Finding(
                "records-set-aside",
                "warning",
                {},
                (Evidence("set_aside_count", 3, 0, "none expected"), Evidence("records_count", 30_803)),
                "Read the reasons in the table of collectors; record again if many.",
            ),
        ),
        tables={
            "not_measured_windows": {
                "state": ["yielded", "clean"],
                "reason": ["torch.profiler", "--clean-steps"],
                "total_ns": [30_000_000, 10_000_000],
                "windows_count": [1, 2],
            },
            "libcupti_faults": {
                "libcupti_version": ["130000"],
                "what": ["No synchronization records for cudaDeviceSynchronize."],
                "touches": ["the table syncs"],
                "fixed_in": [130001],
                "source": ["https://example.com/release-notes (CUDA 13.0 Update 1)"],
            },
            "collectors": {"collector": ["activity"], "state": ["ok"], "records_count": [30_803], "cost_ns": [12_000]},
            "set_aside": {"collector": ["activity"], "reason": ["end_before_start"], "records_count": [3]},
            "damaged_tables": {"table": [], "reason": []},
        },
    )


def kernel_latency(names: tuple[str, ...] = KERNELS) -> Result:
    totals = [40_000_000 // (i + 1) for i in range(len(names))]
    whole = sum(totals)
    bins = [2_000_000_000, 2_100_000_000, 2_200_000_000]
    return Result(
        "kernel-latency",
        "findings",
        metrics=(
            Metric("kernels_count", 77_056),
            Metric("distinct_kernels_count", len(names) + 1),
            Metric("busy_share", 0.254),
        ),
        findings=(
            Finding(
                "long-tail",
                "warning",
                {"kernel": names[-1], "grid_x": 132, "grid_y": 1, "grid_z": 1, "device": 0},
                (
                    Evidence("p99_over_p50_ratio", 4.25, 3.0, "tail_ratio"),
                    Evidence("p50_ns", 3_100),
                    Evidence("p99_ns", 13_175),
                ),
                "See in the heatmap when the slow executions happen, and what runs beside them.",
                Saving(5_200_000, "local"),
            ),
        ),
        tables={
            "kernels": {
                "name": list(names),
                "launches_count": [1_899 - i for i in range(len(names))],
                "total_ns": totals,
                "mean_ns": [t / (1_899 - i) for i, t in enumerate(totals)],
                "p50_ns": [9_020] * len(names),
                "p90_ns": [10_500] * len(names),
                "p99_ns": [11_800] * len(names),
                "max_ns": [85_600] * len(names),
                "gpu_time_share": [t / (whole + 1_000_000) for t in totals],
                "wall_share": [None] * len(names),
                "devices_count": [1] * len(names),
            },
            "heatmap": {
                "kernel": [n for n in names for _ in bins],
                "bin_start_ns": bins * len(names),
                "busy_ns": [10_000_000, 0, 20_000_000] * len(names),
            },
            "devices": {"device": [0], "wall_ns": [283_000_000], "busy_ns": [71_700_000], "busy_share": [0.254]},
        },
        figures=(
            Figure("kernel-time", "heatmap", "heatmap", x="bin_start_ns", y="kernel", value="busy_ns"),
            Figure("kernel-totals", "bars", "kernels", x="total_ns", y="name"),
        ),
    )


def launch_gaps() -> Result:
    bins = [2_000_000_000, 2_100_000_000, 2_200_000_000]
    return Result(
        "launch-gaps",
        "findings",
        metrics=(
            Metric("wall_ns", 283_000_000),
            Metric("idle_ns", 211_000_000),
            Metric("idle_share", 211 / 283),
            Metric("gaps_count", 13_475),
            Metric("median_gap_ns", 4_670),
            Metric("idle_launch_ns", 150_000_000),
            Metric("idle_sync_ns", 60_000_000),
            Metric("idle_dependency_ns", 1_000_000),
            Metric("idle_cupti_overhead_ns", None, "CUPTI's overhead records were not collected"),
        ),
        findings=(
            Finding(
                "launch-bound",
                "critical",
                {"device": 0},
                (
                    Evidence("idle_launch_share", 150 / 283, 0.1, "min_class_share"),
                    Evidence("idle_launch_ns", 150_000_000),
                    Evidence("idle_share", 211 / 283, basis="inferred"),
                ),
                "Capture the step in a CUDA graph, or launch fewer, larger kernels.",
                Saving(150_000_000, "total"),
            ),
        ),
        tables={
            "longest": {
                "device": [0, 0],
                "start_ns": [2_270_152_750, 2_033_891_274],
                "duration_ns": [1_585_612, 1_557_425],
                "class": ["launch", None],
                "work_before": ["DtoH", GEMM],
                "work_after": [SILU, ADD],
                "call": ["cudaLaunchKernel", None],
            },
            "over_time": {
                "bin_start_ns": bins * 2,
                "class": ["launch"] * 3 + ["sync"] * 3,
                "idle_ns": [50_000_000, None, 40_000_000, 10_000_000, None, 5_000_000],
                "idle_share": [0.5, None, 0.4, 0.1, None, 0.05],
            },
        },
        figures=(
            Figure("idle-over-time", "stack", "over_time", x="bin_start_ns", y="idle_share", series="class"),
            Figure("longest-gaps", "table", "longest", x="start_ns", y="duration_ns"),
        ),
    )


def tables() -> dict[str, dict[str, list[Any]]]:
    return {
        "processes": {
            "rank": [0],
            "pid": [4711],
            "command": ["python infer.py <i>--now</i>"],
            "libcupti_version": ["130000"],
            "status": ["traced"],
            "kernels_count": [77_056],
        },
        "devices": {
            "device": [0],
            "name": ["NVIDIA H200"],
            "uuid": ["GPU-6f7d0f7e"],
            "mem_bytes": [150_754_820_096],
            "mem_peak_bytes_per_s": [4.8e12],
            "kernels_count": [77_056],
            "memory_ops_count": [12],
        },
        "windows": {
            "rank": [0],
            "state": ["clean"],
            "reason": ["--clean-steps"],
            "start_ns": [2_100_000_000],
            "end_ns": [2_110_000_000],
        },
        "samples": {
            "device": [0, 0, 0, 0],
            "metric": ["power_w", "power_w", "gpu_busy_share", "gpu_busy_share"],
            "t_ns": [0, 100_000_000, 0, 100_000_000],
            "value": [120.0, 530.5, 0.0, 0.93],
        },
        "inventory": {"table": ["kernels", "ops"], "state": ["collected", "absent"], "reason": ["", ""]},
    }


def alone(result: Result) -> Report:
    """A report of one answer."""
    return Report(manifest(), (result,), "t")


def rich() -> Report:
    return Report(manifest(), (truth(), kernel_latency(), launch_gaps()), "infer-20251124", tables=tables())


def hostile() -> Report:
    return Report(
        manifest(
            command=("sh", "-c", HOSTILE[0], HOSTILE[2]), host=HOSTILE[1], notes=HOSTILE, options={HOSTILE[0]: "x"}
        ),
        (truth(), kernel_latency(HOSTILE), Result("launch-gaps", "error", reason=HOSTILE[4])),
        HOSTILE[0],
        tables={**tables(), "processes": {"rank": [0], "pid": [1], "command": [HOSTILE[0]], "status": [HOSTILE[3]]}},
    )


def empty() -> Report:
    """A program that used no GPU: nothing happened, and that is no fault."""
    zeros = ("dropped_count", "repaired_count", "set_aside_count", "kernels_count")
    none = (Metric("step_untraced_ns", None, "no step was timed"), Metric("known_origin_share", None, "no GPU work"))
    return Report(
        manifest(command=(), versions={}, collectors={}, options={}, notes=(), duration_ns=0),
        (
            Result("truth", "ok", metrics=(*(Metric(n, 0) for n in zeros), *none)),
            Result("kernel-latency", "not_applicable", reason="no kernel ran while recording"),
            Result("launch-gaps", "not_applicable", reason="no GPU work lies in a recorded window"),
        ),
        "idle",
    )


def not_measured() -> Report:
    results = tuple(
        Result(a, "not_measured", reason=f"the table 'kernels' was not collected ({a})", collect_with="spikeprof run")
        for a in ("truth", "kernel-latency", "launch-gaps")
    )
    return Report(manifest(), results, "unseen")


def broken() -> Report:
    """Every analyzer failed."""
    results = tuple(
        Result(a, "error", reason="ZeroDivisionError: division by zero")
        for a in ("truth", "kernel-latency", "launch-gaps")
    )
    return Report(manifest(exit_code=3), results, "broken")


ALL = {"rich": rich, "hostile": hostile, "empty": empty, "not_measured": not_measured, "broken": broken}
