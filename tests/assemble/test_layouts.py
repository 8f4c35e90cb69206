from __future__ import annotations

import pytest

from spikeprof.profiler.assemble import layouts as lay
from spikeprof.profiler.assemble.layouts import layout_for

#: Our field -> cupti-python's, where the names differ.
_WORK = {"device": "device_id", "context": "context_id", "stream": "stream_id", "correlation": "correlation_id"}
_GRAPH = {"graph_node": "graph_node_id", "graph": "graph_id"}
_THEIR_NAMES = {
    lay.KERNEL: _WORK
    | _GRAPH
    | {
        "registers": "registers_per_thread",
        "shared_static": "static_shared_memory",
        "shared_dynamic": "dynamic_shared_memory",
        "local": "local_memory_per_thread",
    },
    lay.MEMCPY: _WORK | _GRAPH,
    lay.MEMCPY_PEER: _WORK | _GRAPH,
    lay.MEMSET: _WORK | _GRAPH,
    lay.RUNTIME: {"thread": "thread_id", "correlation": "correlation_id"},
    lay.OVERHEAD: {},
    lay.DEVICE: {
        "mem_bandwidth_kb": "global_memory_bandwidth",
        "mem_bytes": "global_memory_size",
        "l2_bytes": "l2cache_size",
        "sm_count": "num_multiprocessors",
        "sm_major": "compute_capability_major",
        "sm_minor": "compute_capability_minor",
        "device": "id",
    },
}

#: cupti-python's dtype -> (kind, a libcupti version that writes it). The versions are the ones in which the
#: struct of that name stands in NVIDIA's cupti_activity.h.
_DTYPES = {
    "activity_kernel9_dtype": (lay.KERNEL, 22),
    "activity_kernel10_dtype": (lay.KERNEL, 130001),
    "activity_kernel11_dtype": (lay.KERNEL, 130100),
    "activity_kernel12_dtype": (lay.KERNEL, 130300),
    "activity_kernel13_dtype": (lay.KERNEL, 130400),
    "activity_memcpy5_dtype": (lay.MEMCPY, 24),
    "activity_memcpy6_dtype": (lay.MEMCPY, 26),
    "activity_memcpy7_dtype": (lay.MEMCPY, 130400),
    "activity_memcpy_pto_p4_dtype": (lay.MEMCPY_PEER, 130001),
    "activity_memset4_dtype": (lay.MEMSET, 130001),
    "activity_memset5_dtype": (lay.MEMSET, 130400),
    "activity_api_dtype": (lay.RUNTIME, 130001),
    "activity_overhead3_dtype": (lay.OVERHEAD, 130001),
    "activity_device5_dtype": (lay.DEVICE, 130001),
    "activity_device6_dtype": (lay.DEVICE, 130200),
    "activity_synchronization_dtype": (lay.SYNC, 22),
    "activity_synchronization2_dtype": (lay.SYNC, 26),
    "activity_external_correlation_dtype": (lay.EXTERNAL_CORRELATION, 130001),
    "activity_cuda_event2_dtype": (lay.CUDA_EVENT, 130001),
}


@pytest.mark.parametrize("dtype_name", _DTYPES)
def test_sizes_and_offsets_are_those_of_cupti_python(dtype_name: str) -> None:
    cupti = pytest.importorskip("cupti.cupti", reason="cupti-python is not installed")
    theirs = getattr(cupti, dtype_name, None)
    if theirs is None:
        pytest.skip(f"this cupti-python has no {dtype_name}")
    kind, version = _DTYPES[dtype_name]
    layout = layout_for(version)
    assert layout is not None
    assert layout.size_of[kind] == theirs.itemsize
    if kind not in layout.dtype_of:
        return  # walked over, not read
    ours = layout.dtype_of[kind]
    names = _THEIR_NAMES[kind]
    for field in ours.names or ():
        format_, offset = ours.fields[field][:2]
        if field in ("process", "thread") and kind == lay.OVERHEAD:  # a union of threads and streams
            union, begin = theirs.fields["object_id"][:2]
            their_format, inside = union.fields["pt"][0].fields[f"{field}_id"][:2]
            their_offset = begin + inside
        else:
            their_format, their_offset = theirs.fields[names.get(field, field)][:2]
        assert (field, offset, format_.itemsize) == (field, their_offset, their_format.itemsize)


#: What libraries themselves said (cuptiActivityGetStructSize, from 13.1 on), and 13.0's records on an H200.
_SEEN = {
    130000: {10: 216, 1: 96, 2: 88, 22: 96, 4: 40, 5: 40, 38: 56, 17: 56, 8: 184},
    130001: {10: 216, 1: 96, 2: 88, 22: 96, 4: 40, 5: 40, 38: 56, 17: 56, 8: 184},
    130100: {10: 224, 8: 184},
    130200: {10: 224, 8: 192},
    130300: {10: 232, 1: 96, 2: 88, 8: 192},
    130400: {10: 248, 1: 112, 2: 104, 22: 96, 8: 192},
    130500: {10: 248, 1: 112, 2: 104, 22: 96, 8: 192},
}

#: sizeof of the newest struct of each kind in the cupti_activity.h of these toolkits.
_HEADERS = {
    20: {10: 208, 1: 88, 22: 96, 2: 88, 5: 40, 17: 40, 8: 184, 38: 40, 36: 24, 39: 24},  # 12.2
    21: {10: 208, 1: 88, 22: 96, 2: 88, 5: 40, 17: 48, 8: 184, 38: 40, 36: 24, 39: 24},  # 12.3
    22: {10: 208, 1: 88, 22: 96, 2: 88, 5: 40, 17: 56, 8: 184, 38: 40, 36: 24, 39: 24},  # 12.4
    24: {10: 208, 1: 88, 22: 96, 2: 88, 5: 40, 17: 56, 8: 184, 38: 40, 36: 24, 39: 24},  # 12.6
    26: {10: 208, 1: 96, 22: 96, 2: 88, 5: 40, 17: 56, 8: 184, 38: 56, 36: 56, 39: 24},  # 12.8
    28: {10: 208, 1: 96, 22: 96, 2: 88, 5: 40, 17: 56, 8: 184, 38: 56, 36: 56, 39: 24},  # 12.9 Update 1
    130101: {10: 224, 1: 96, 22: 96, 2: 88, 5: 40, 17: 56, 8: 184, 38: 56, 36: 56, 39: 24},
}


@pytest.mark.parametrize(("version", "sizes"), [*_SEEN.items(), *_HEADERS.items()])
def test_sizes_by_version(version: int, sizes: dict[int, int]) -> None:
    layout = layout_for(version)
    assert layout is not None
    assert {kind: layout.size_of[kind] for kind in sizes} == sizes


@pytest.mark.parametrize("version", [0, 12, 17, 19, 29, 120800, 130501, 130600, 140000])
def test_a_version_never_seen_is_not_guessed(version: int) -> None:
    assert layout_for(version) is None


def test_cuda_12_0_is_told_from_11_8_by_the_librarys_name() -> None:
    assert layout_for(18) is None
    assert layout_for(18, library="/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.11.8") is None
    layout = layout_for(18, library="/venv/nvidia/cuda_cupti/lib/libcupti.so.12")
    assert layout is not None
    assert (layout.size_of[lay.KERNEL], layout.size_of[lay.DEVICE]) == (208, 176)


def test_what_a_newer_library_says_of_itself_is_enough_and_wins() -> None:
    newer = layout_for(150000, {lay.KERNEL: 264, lay.MEMCPY: 120})
    assert newer is not None
    assert newer.size_of == {lay.KERNEL: 264, lay.MEMCPY: 120}
    assert newer.dtype_of[lay.KERNEL].itemsize == 264
    assert newer.dtype_of[lay.KERNEL].fields is not None
    assert newer.dtype_of[lay.KERNEL].fields["graph"][1] == 156
    known = layout_for(130001, {lay.KERNEL: 232})
    assert known is not None
    assert (known.size_of[lay.KERNEL], known.size_of[lay.MEMCPY]) == (232, 96)


def test_a_kind_that_the_library_does_not_know_is_left_to_the_table() -> None:
    layout = layout_for(130001, {lay.MEMCPY_PEER: 0})
    assert layout is not None
    assert layout.size_of[lay.MEMCPY_PEER] == 96


@pytest.mark.parametrize(
    "sizes",
    [
        {lay.KERNEL: 217},  # not whole words
        {lay.KERNEL: 152},  # no room for the graph's id
        {lay.KERNEL: -216},
        {lay.KERNEL: 4096},
        {300: 40},
        {0: 40},
        {-1: 40},
    ],
)
def test_sizes_that_cannot_be_true_are_refused(sizes: dict[int, int]) -> None:
    assert layout_for(130001, sizes) is None
