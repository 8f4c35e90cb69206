"""The tables of a trace: columns, types, units, one line of doc each. The only definition.

Conventions, in force for every table:

* Times are int64 nanoseconds on one clock; 0 is the session's start (``t0_unix_ns`` in the manifest).
* Intervals are half open, ``[start_ns, end_ns)``.
* A numeric column ends in its unit (``profiler/units.py``) unless it is an ordinal (``rank``, ``stream``)
  or a dimension in blocks or threads (``grid_x``). A reference to another row ends in ``_id``.
* An empty table means "collected, nothing happened". An absent table means "not collected".
* ``correlation_id`` 0 means none. Correlation ids are scoped by ``rank``.
* ``rank`` is the ordinal of the process in this trace, equal to ``RANK`` where the launcher set it.
* ``device`` is the ordinal of the GPU in this trace (one number per physical GPU, whatever
  ``CUDA_VISIBLE_DEVICES`` called it in each process).

Raise ``SCHEMA_VERSION`` whenever a reader of the old version would misread the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = 1

_NAME = pa.dictionary(pa.int32(), pa.string())
_I64, _I32, _I16, _I8, _U64 = pa.int64(), pa.int32(), pa.int16(), pa.int8(), pa.uint64()
_F64, _BOOL, _STR = pa.float64(), pa.bool_(), pa.string()


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow type and one line of documentation."""

    name: str
    type: pa.DataType
    doc: str


@dataclass(frozen=True, slots=True)
class Table:
    """One table: what a row is, and its columns in order. Rows are sorted by ``sort_by``."""

    name: str
    doc: str
    sort_by: str | None
    columns: tuple[Column, ...]

    @property
    def arrow(self) -> pa.Schema:
        """The Arrow schema of the table, without metadata."""
        return pa.schema([(c.name, c.type) for c in self.columns])

    def empty(self) -> pa.Table:
        """The table with no rows: "collected, nothing happened"."""
        return self.arrow.empty_table()

    def of_rows(self, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
        """The table from rows that hold all its columns but a row number, which is filled in."""
        rows, own = list(rows), self.columns[0].name if self.columns[0].doc == "row number" else ""
        arrays = []
        for column in self.columns:
            values = [i if column.name == own else row[column.name] for i, row in enumerate(rows)]
            if pa.types.is_dictionary(column.type):
                arrays.append(pa.array(values, pa.string()).dictionary_encode().cast(column.type))
            else:
                arrays.append(pa.array(values, column.type))
        return pa.Table.from_arrays(arrays, schema=self.arrow)


_RANK = Column("rank", _I32, "process ordinal")
_DEVICE = Column("device", _I32, "GPU ordinal in this trace")
_CONTEXT = Column("context_id", _I32, "CUDA context within the process")
_STREAM = Column("stream", _I32, "CUDA stream id within the context")
_CORRELATION = Column("correlation_id", _I64, "ties GPU work to the call that launched it; 0 = none")
_START = Column("start_ns", _I64, "first nanosecond")
_END = Column("end_ns", _I64, "one past the last nanosecond")
_GRAPH = Column("graph_id", _I32, "executable CUDA graph that launched it; 0 = launched directly")
_NODE = Column("graph_node_id", _I64, "node of that executable graph; 0 = launched directly")
_SHAPE = (
    *(Column(f"grid_{axis}", _I32, "blocks") for axis in "xyz"),
    *(Column(f"block_{axis}", _I32, "threads") for axis in "xyz"),
)

_TABLES = (
    Table(
        "processes",
        "One process of the program under test, traced or not.",
        "rank",
        (
            _RANK,
            Column("pid", _I64, "operating-system process number"),
            Column("parent_pid", _I64, "the parent's process number"),
            Column("command", _STR, "command line, arguments joined by spaces"),
            Column("python_version", _STR, "e.g. 3.12.3; empty for a process that is not Python"),
            Column("libcupti_version", _STR, "cuptiGetVersion of the library it used, e.g. 130001; empty = none"),
            Column("status", _STR, "traced, partial, no_cuda or not_traced"),
            Column("reason", _STR, "why not, or why partial; empty when traced"),
        ),
    ),
    Table(
        "devices",
        "One GPU as one process saw it.",
        None,
        (
            _RANK,
            _DEVICE,
            Column("process_device", _I32, "the CUDA ordinal in that process"),
            Column("uuid", _STR, "GPU-xxxxxxxx-…, empty when unknown"),
            Column("name", _STR, "product name"),
            Column("sm_arch", _STR, "e.g. sm_90"),
            Column("sm_count", _I32, "streaming multiprocessors"),
            Column("l2_bytes", _I64, "L2 cache size"),
            Column("mem_bytes", _I64, "device memory size"),
            Column("mem_peak_bytes_per_s", _F64, "theoretical DRAM bandwidth; null = unknown"),
            Column("peak_source", _STR, "where the peak comes from"),
        ),
    ),
    Table(
        "kernels",
        "One kernel execution on a GPU.",
        "start_ns",
        (
            Column("kernel_id", _I64, "row number"),
            _RANK,
            _DEVICE,
            _CONTEXT,
            _STREAM,
            _CORRELATION,
            _GRAPH,
            _NODE,
            Column("name", _NAME, "demangled where possible, else as recorded"),
            _START,
            _END,
            *_SHAPE,
            Column("registers_count", _I32, "registers per thread"),
            Column("shared_static_bytes", _I32, "static shared memory per block"),
            Column("shared_dynamic_bytes", _I32, "dynamic shared memory per block"),
            Column("local_bytes", _I32, "local memory per thread"),
        ),
    ),
    Table(
        "memory_ops",
        "One copy or memset on a GPU.",
        "start_ns",
        (
            Column("op_id", _I64, "row number"),
            _RANK,
            _DEVICE,
            _CONTEXT,
            _STREAM,
            _CORRELATION,
            _GRAPH,
            _NODE,
            Column("kind", _NAME, "HtoD, DtoH, DtoD, HtoH, PtoP, HtoA, AtoH, AtoA, AtoD, DtoA, memset or unknown"),
            Column("src_memory", _NAME, "pageable, pinned, device, array, managed or unknown"),
            Column("dst_memory", _NAME, "pageable, pinned, device, array, managed or unknown"),
            Column("size_bytes", _I64, "bytes moved or set"),
            _START,
            _END,
        ),
    ),
    Table(
        "runtime_calls",
        "One CUDA runtime or driver call that launches, copies or synchronises (not every call).",
        "start_ns",
        (
            Column("call_id", _I64, "row number"),
            _RANK,
            Column("thread_id", _I64, "operating-system or CUPTI thread number"),
            _CORRELATION,
            Column("name", _NAME, "e.g. cudaLaunchKernel"),
            _START,
            _END,
            Column("return_code", _I32, "0 = success"),
        ),
    ),
    Table(
        "syncs",
        "One wait for the GPU as CUPTI saw it.",
        "start_ns",
        (
            _RANK,
            _CONTEXT,
            _STREAM,
            _CORRELATION,
            Column("kind", _NAME, "event, stream_wait_event, stream, context or unknown"),
            _START,
            _END,
        ),
    ),
    Table(
        "overheads",
        "One stretch of time that CUPTI says it took itself.",
        "start_ns",
        (
            _RANK,
            Column("thread_id", _I64, "thread that paid; 0 = unknown"),
            Column("kind", _NAME, "driver_compiler, buffer_flush, instrumentation, resource, …"),
            _START,
            _END,
        ),
    ),
    Table(
        "graph_nodes",
        "One CUDA graph node that was created or cloned while the program was watched.",
        None,
        (
            _RANK,
            Column("graph_node_id", _I64, "the node"),
            Column("source_node_id", _I64, "the node it was cloned from; 0 = created, not cloned"),
            Column("graph_id", _I32, "the graph it belongs to; 0 = unknown"),
            Column("t_ns", _I64, "when"),
        ),
    ),
    Table(
        "windows",
        "What was being recorded when, per process: a partition of the process's traced life.",
        "start_ns",
        (
            _RANK,
            Column("state", _NAME, "traced, clean (deliberately untraced), yielded, off or stopped"),
            Column("reason", _NAME, "e.g. clean-steps, torch.profiler, --window, --max-bytes"),
            _START,
            _END,
        ),
    ),
    Table(
        "steps",
        "One step of the program, timed by CUDA events: no tracing needed.",
        "start_ns",
        (
            Column("step_id", _I64, "row number"),
            _RANK,
            Column("kind", _NAME, "forward, graph_replay or marked"),
            Column("traced", _BOOL, "whether CUPTI recorded during this step"),
            Column("start_ns", _I64, "host time at which the step began"),
            Column("duration_ns", _I64, "from this step's CUDA event to the next one's"),
        ),
    ),
    Table(
        "ops",
        "One operator call on the host (torch.profiler imports, attribution windows).",
        "start_ns",
        (
            Column("op_id", _I64, "row number"),
            _RANK,
            Column("thread_id", _I64, "thread"),
            Column("name", _NAME, "e.g. aten::mm"),
            _START,
            _END,
            Column("input_shapes", _STR, "JSON list, empty when not recorded"),
            Column("input_dtypes", _STR, "JSON list, empty when not recorded"),
        ),
    ),
    Table(
        "ranges",
        "A named stretch of host time: a step, a request, a module, a user's annotation.",
        "start_ns",
        (
            Column("range_id", _I64, "row number"),
            _RANK,
            Column("thread_id", _I64, "thread"),
            Column("kind", _NAME, "step, request or stage (marked), nvtx, module or user (imported)"),
            Column("name", _STR, "label"),
            _START,
            _END,
            Column("attributes", _STR, "JSON object, e.g. llm.batch_size; empty when there are none"),
        ),
    ),
    Table(
        "samples",
        "One reading of a device-wide gauge (NVML, GPM).",
        "t_ns",
        (
            _DEVICE,
            Column("t_ns", _I64, "when"),
            Column("metric", _NAME, "name ending in its unit; _total_ in it: a counter since the driver was loaded"),
            Column("value", _F64, "in the unit of the metric's name"),
        ),
    ),
    Table(
        "counter_samples",
        "One hardware counter over one sampling interval of one GPU, as taken: whatever ran there.",
        "start_ns",
        (
            _DEVICE,
            _START,
            _END,
            Column("metric", _NAME, "a name of profiler/counter_metrics.py, or CUPTI's own"),
            Column("value", _F64, "sums: the count in this interval; means: the average over it"),
        ),
    ),
    Table(
        "kernel_classes",
        "Identical launches: kernels of one name, grid and block on one GPU.",
        None,
        (
            Column("class_id", _I32, "row number"),
            _DEVICE,
            Column("name", _NAME, "as in kernels"),
            *_SHAPE,
            Column("launches_count", _I64, "launches while counters were sampled"),
            Column("total_ns", _I64, "their durations together"),
        ),
    ),
    Table(
        "counters",
        "One hardware counter of one launch, or per launch of a class, attributed from counter_samples by time.",
        None,
        (
            Column("kernel_id", _I64, "row of kernels; -1 = the mean over the launches of the class"),
            Column("class_id", _I32, "row of kernel_classes"),
            Column("metric", _NAME, "as in counter_samples"),
            Column("value", _F64, "per launch; NaN where match is none"),
            Column("low", _F64, "lower bound of the value"),
            Column("high", _F64, "upper bound of the value"),
            Column("match", _NAME, "exact (its own samples), class (solved over identical launches) or none"),
        ),
    ),
    Table(
        "counter_balance",
        "Where one GPU's counts went: the values of one metric add up to all that was sampled.",
        None,
        (
            _DEVICE,
            Column("metric", _NAME, "as in counter_samples; sums only"),
            Column("place", _NAME, "kernels, memory_ops, idle or not_traced (recording was off)"),
            Column("value", _F64, "the count there"),
            Column("time_ns", _I64, "how much time that was"),
        ),
    ),
    Table(
        "topology",
        "What joins two GPUs, or a GPU and the host, in one direction.",
        None,
        (
            Column("src_device", _I32, "GPU ordinal in this trace; -1 = the host"),
            Column("dst_device", _I32, "GPU ordinal in this trace; -1 = the host"),
            Column("kind", _NAME, "nvlink, nvswitch, pcie or unknown: the fastest way between the two"),
            Column("pcie_path", _STR, "where two GPUs meet on PCIe: PIX, PXB, PHB, NODE or SYS; empty = unknown"),
            Column("generation", _I32, "of NVLink or PCIe, as it ran; 0 = unknown"),
            Column("max_generation", _I32, "the highest that both ends can run; 0 = unknown"),
            Column("links_count", _I32, "NVLinks or PCIe lanes in use; null = unknown"),
            Column("max_links_count", _I32, "the same with NVLinks that are down, and unused lanes; null = unknown"),
            Column("peer_access", _STR, "P2P status of two GPUs as the driver says: ok, or why not; empty = unknown"),
            Column("numa_node", _I32, "nearest to the GPU of a host row; -1 = unknown, or two GPUs"),
            Column("peak_bytes_per_s", _F64, "theoretical, this direction; null = unknown"),
            Column("peak_source", _STR, "where the peak comes from, or why it is unknown"),
            Column("measured_bytes_per_s", _F64, "by a copy in this direction; null = not measured"),
            Column("measured_reason", _STR, "why it was not measured; empty when it was"),
        ),
    ),
    Table(
        "cpu_cache",
        "CPU cache reads and misses of the program over one interval, all its threads together.",
        "start_ns",
        (
            _START,
            _END,
            Column("metric", _NAME, "l1d_read_count, l1d_read_miss_count, llc_read_count or llc_read_miss_count"),
            Column("value_count", _F64, "in this interval, scaled up where the kernel multiplexed counters"),
            Column("counted_share", _F64, "share of the program's CPU time in it during which it was really counted"),
        ),
    ),
    Table(
        "modules",
        "One module of the model, where launches were attributed; the same module of two processes is two rows.",
        None,
        (
            Column("module_id", _I32, "row number"),
            _RANK,
            Column("parent_id", _I32, "the nearest module around it that was called; -1 = a root"),
            Column("path", _STR, "qualified name below its root, e.g. layers.7.mlp.up; empty for a root"),
            Column("class_name", _STR, "e.g. Linear"),
        ),
    ),
    Table(
        "stacks",
        "One place in Python from which work was launched.",
        None,
        (
            Column("stack_id", _I32, "row number"),
            _RANK,
            Column("file", _STR, "of the chosen frame: the innermost that is no library's, else the innermost"),
            Column("line", _I32, "of the chosen frame, from 1; 0 = unknown"),
            Column("function", _STR, "of the chosen frame"),
            Column("frames", _STR, 'JSON list of "file:line function", innermost first'),
        ),
    ),
    Table(
        "origins",
        "One place that kernels come from: a module, a line and an operator with the shapes of its inputs.",
        None,
        (
            Column("origin_id", _I32, "row number"),
            _RANK,
            Column("module_id", _I32, "row of modules; -1 = not known"),
            Column("stack_id", _I32, "row of stacks; -1 = not known"),
            Column("op", _NAME, "e.g. aten::mm, or triton:: and the function of a Triton kernel; null = not known"),
            Column("input_shapes", _STR, "JSON list, empty when not recorded"),
            Column("input_dtypes", _STR, "JSON list, empty when not recorded"),
        ),
    ),
    Table(
        "kernel_owners",
        "Where one kernel comes from: one row per row of kernels.",
        "kernel_id",
        (
            Column("kernel_id", _I64, "row of kernels"),
            Column("origin_id", _I32, "row of origins; -1 = not known"),
            Column(
                "match",
                _NAME,
                "exact (its launch was seen), graph (its node was seen created), position (same place in a sequence "
                "of kernels), signature (same name and grid, one origin only) or none",
            ),
        ),
    ),
    Table(
        "tensor_stats",
        "One scan of one tensor that a module of the model gave or took (`spikeprof run --numerics`).",
        "t_ns",
        (
            _RANK,
            Column("step", _I64, "the how many-th call of the outermost module it belongs to, from 0"),
            Column("order", _I32, "place among the scans of the step, in the order in which the modules ran, from 0"),
            Column("module", _NAME, "qualified name below the outermost module; empty for that one"),
            Column("class_name", _NAME, "of the module, e.g. Linear"),
            Column("role", _NAME, "output, input, weight, gradient, kv or scale (of what is quantised)"),
            Column("dtype", _NAME, "e.g. float16; int4: two codes in a byte"),
            Column("elements_count", _I64, "all elements"),
            Column("amax_value", _F64, "largest finite magnitude, of integers of the codes; NaN = no finite element"),
            Column("smallest_value", _F64, "smallest finite magnitude above zero; NaN = none"),
            Column("nan_count", _I64, "NaN elements"),
            Column("inf_count", _I64, "infinite elements"),
            Column("subnormal_count", _I64, "elements below the smallest normal number, but not zero"),
            Column("zero_count", _I64, "elements that are zero"),
            Column("saturated_count", _I64, "elements at the largest finite number, or at the end codes of integers"),
            Column("first_bad_index", _I64, "flat index of the first NaN or infinite element; -1 = none"),
            Column("real_amax_value", _F64, "what codes stand for at most, by their scale; NaN = no scale is known"),
            Column("real_dtype", _NAME, "the format of that, e.g. float16; empty = no scale is known"),
            Column("dimensions_count", _I32, "dimensions of the tensor"),
            Column("rows_count", _I64, "length of the leading dimension; 0 = fewer than two, empty, or not the batch"),
            Column("bad_rows", _U64, "bit r: row r has NaN or Inf; of more than 64 rows r * 64 // rows_count"),
            Column("scanned", _NAME, "at_once (as its module ended), later, or changed (later, written to in between)"),
            Column("t_ns", _I64, "when"),
        ),
    ),
    Table(
        "bad_operators",
        "One process's first scan with Inf or NaN, and the operator in the module that it came from.",
        None,
        (
            _RANK,
            Column("step", _I64, "of that scan"),
            Column("order", _I32, "of that scan"),
            Column("module", _NAME, "of that scan: its qualified name; empty for the outermost one"),
            Column("class_name", _NAME, "of the module"),
            Column("role", _NAME, "of that scan: output or input; others have no operators that could be run again"),
            Column("kept", _NAME, "which inputs were kept: first (of that step), later (of a later bad one) or none"),
            Column("taken", _STR, "JSON list of the tensors that were kept: shape, dtype, amax, nan, inf"),
            Column("run_module", _NAME, "the module that was run again: that one, or the one around it"),
            Column("op", _NAME, "the first operator with a bad output from fine inputs; empty = not known"),
            Column("file", _STR, "where it was called: the innermost line that is not torch's; empty = none is"),
            Column("line", _I32, "of that call, from 1; 0 = unknown"),
            Column("function", _STR, "of that call"),
            Column("before_count", _I32, "operators of the module before it"),
            Column("inputs", _STR, "JSON list of its tensors: shape, dtype, amax (null = none finite), nan, inf"),
            Column("output", _STR, "JSON object of the same of its first bad output; empty = none"),
            Column("first_bad_index", _I64, "flat index of the first NaN or infinite element of the output; -1 = none"),
            Column("why_not", _STR, "why the operator is not known; empty where it is"),
        ),
    ),
    Table(
        "model_graphs",
        "One static graph of a model: how it was read, and what its run as a whole took.",
        None,
        (
            Column("model_id", _I32, "row number"),
            Column("name", _STR, "the factory or file it came from"),
            Column("model", _STR, "class of the model; empty for a file"),
            Column("via", _NAME, "export (torch.export), fx (torch.fx) or json (a file)"),
            Column("remark", _STR, "what limits the graph, e.g. why torch.export refused; empty where nothing does"),
            Column("device", _STR, "where its tensors are, e.g. cuda:0, cpu or meta; empty = unknown"),
            Column("device_name", _STR, "product name of that device; empty = unknown"),
            Column("torch_version", _STR, "empty for a file"),
            Column("timed_with", _STR, "cuda_events (resolution 0.5 us) or host_clock; empty = not timed"),
            Column("timed_reason", _STR, "why it was not timed; empty when it was"),
            Column("runs_count", _I32, "timed runs, after warm-up"),
            Column("floor_ns", _F64, "median of what a node that does nothing reads; null = not timed"),
            Column("forward_ns", _F64, "median of the whole model, not node by node; null = not timed"),
            Column("weights_bytes", _I64, "memory of parameters and buffers, shared ones once; null = unknown"),
            Column("graph_peak_bytes", _I64, "most that a run node by node allocated at once; null = not measured"),
            Column("model_peak_bytes", _I64, "most that a run of the model allocated at once; null = not measured"),
        ),
    ),
    Table(
        "model_nodes",
        "One node of a static graph, in the order in which the graph lists them.",
        None,
        (
            Column("node_id", _I64, "row number"),
            Column("model_id", _I32, "row of model_graphs"),
            Column("name", _STR, "unique within the graph"),
            Column("kind", _NAME, "parameter (buffers and constants, too), input, op or output"),
            Column("op", _NAME, "e.g. aten::mm; a leaf module of torch.fx: its class; empty where kind says all"),
            Column("module", _NAME, "qualified name of the module it belongs to; empty = the model itself"),
            Column("class_name", _NAME, "class of that module; empty = unknown"),
            Column("device", _NAME, "where its outputs are; empty = unknown"),
            Column("latency_ns", _F64, "median time of the node; null = not timed"),
            Column("latency_low_ns", _F64, "shortest of the timed runs; null = not timed"),
            Column("host_ns", _F64, "median time of its call on the host; null = not timed apart"),
        ),
    ),
    Table(
        "model_tensors",
        "One tensor that a node of a static graph gives.",
        None,
        (
            Column("tensor_id", _I64, "row number"),
            Column("node_id", _I64, "row of model_nodes"),
            Column("index", _I32, "which of the node's outputs, from 0"),
            Column("storage_id", _I64, "memory it lies in: views and in-place results share their source's"),
            Column("shape", _STR, "JSON list of sizes; a size that is not known is text"),
            Column("strides", _STR, "JSON list of elements; empty = unknown"),
            Column("offset_count", _I64, "elements before the first; null = unknown"),
            Column("dtype", _NAME, "e.g. float16; empty = unknown"),
            Column("element_bytes", _I32, "bytes of an element; 0 = unknown"),
            Column("storage_bytes", _I64, "size of its memory; null = unknown"),
        ),
    ),
    Table(
        "model_edges",
        "One use of a node's output by another node of a static graph.",
        None,
        (
            Column("src_node_id", _I64, "row of model_nodes: the one that gives"),
            Column("dst_node_id", _I64, "row of model_nodes: the one that takes"),
            Column("position", _I32, "which of the taker's inputs, from 0"),
        ),
    ),
)

#: Every table by name.
TABLES: dict[str, Table] = {t.name: t for t in _TABLES}

#: Tables whose rows are intervals of GPU work; busy time is the union over both.
GPU_WORK_TABLES = ("kernels", "memory_ops")
