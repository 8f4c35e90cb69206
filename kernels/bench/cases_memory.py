"""Cases of the probes and of the layout change."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from spikeprof.kernels import probes
from spikeprof.kernels.bench.case import FLOPS, Case, NotMeasured, drawn
from spikeprof.kernels.layout import BLOCK, blocks_of, nchwc16_to_nhwc, nhwc_to_nchwc16, nhwc_to_nchwc16_naive
from spikeprof.kernels.paths import TORCH

_COPY_GPU, _COPY_SMALL = 1 << 28, 1 << 16  # fp32 elements: 1 GiB, 256 KiB
_PASSES = 16
_LAUNCHES = 20


def cases(device: torch.device, small: bool) -> Iterator[Case | NotMeasured]:
    """Bandwidth, operations, L2, gathers, launches, shared memory, links; then layouts."""
    yield _copy(_COPY_SMALL if small else _COPY_GPU)
    for dtype, size in ((torch.float32, 128),) if small else ((torch.float16, 8192), (torch.bfloat16, 4096)):
        yield _product(size, dtype)
    yield _l2(1 << 14 if small else 1 << 22)
    yield _gather(*((4096, 1024) if small else (1 << 24, 1 << 22)))
    yield _launch()
    yield from _transposes(device, small)
    yield _peer(device, 1 << 26)
    yield from _layouts((2, 8, 8, 40) if small else (64, 112, 112, 64), torch.float32 if small else torch.float16)


def _copy(elements: int) -> Case:
    return Case(
        "stream_copy",
        f"{elements >> 10} Ki fp32",
        lambda device: (x := drawn(elements, device=device), torch.empty_like(x)),
        lambda pair: probes.stream_copy(*pair),
        bytes_moved=8 * elements,
        check=lambda pair, out: (out, pair[0]),
        twins={"torch copy_": lambda pair: pair[1].copy_(pair[0])},
    )


def _product(size: int, dtype: torch.dtype) -> Case:
    rows = min(size, 64)  # that are checked: a product of all in float64 takes long
    bounds = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
    return Case(
        "matmul",
        f"{size}³ {_short(dtype)}",
        lambda device: tuple(drawn(size, size, device=device, dtype=dtype, seed=seed) for seed in (1, 2)),
        lambda pair: probes.matmul(*pair),
        bytes_moved=3 * size * size * dtype.itemsize,
        flops=2 * size**3,
        bound_by=FLOPS,
        check=lambda pair, out: (out[:rows], pair[0][:rows].double() @ pair[1].double()),
        error_bound=bounds[dtype],
        twins={"torch.matmul": lambda pair: torch.matmul(*pair)},
    )


def _l2(elements: int) -> Case:
    return Case(
        "read_again",
        f"{elements >> 8} KiB, {_PASSES} passes",
        lambda device: drawn(elements, device=device).abs(),
        lambda x: probes.read_again(x, _PASSES),
        bytes_moved=_PASSES * 4 * elements,
        check=lambda x, out: (out.double().sum(), _PASSES * x.double().sum()),
        error_bound=1e-5,
    )


def _gather(rows: int, count: int, width: int = 8) -> Case:
    return Case(
        "gather",
        f"{count >> 10} Ki of {rows >> 10} Ki x {width} fp32",
        lambda device: (drawn(rows, width, device=device), probes.random_rows(rows, count, device=device)),
        lambda pair: probes.gather(*pair),
        bytes_moved=count * (2 * 4 * width + 8),
        check=lambda pair, out: (out, pair[0][pair[1]]),
        twins={"torch index_select": lambda pair: torch.index_select(pair[0], 0, pair[1])},
    )


def _launch() -> Case:
    return Case(
        "launch_empty",
        f"{_LAUNCHES} launches",
        lambda device: device,
        lambda device: probes.launch_empty(_LAUNCHES, device=device),
        bytes_moved=0,
        twins={"torch zero_": lambda device: probes.launch_empty(_LAUNCHES, device=device, path=TORCH)},
        queued=False,
    )


def _transposes(device: torch.device, small: bool) -> Iterator[Case | NotMeasured]:
    """Through the three tiles. 16 MiB stay in L2, where shared memory is the limit sooner; with 16 passes it is."""
    reason = probes.why_no_nvrtc() if device.type == "cuda" else ""
    if reason:
        yield NotMeasured("transpose", reason)
        return
    for tile in ("padded", "swizzled"):
        for size, passes in ((64, 1),) if small else ((2048, 1), (8192, 1), (2048, 16)):
            yield Case(
                f"transpose {tile}",
                f"{size} x {size} fp32" + (f", {passes} passes" if passes > 1 else ""),
                partial(_matrix, size),
                partial(probes.transpose, tile=tile, passes=passes),
                bytes_moved=8 * size * size,
                check=lambda x, out: (out, x.t()),
                twins={"conflicting": partial(probes.transpose, tile="conflicting", passes=passes)},
            )


def _matrix(size: int, device: torch.device) -> Tensor:
    return drawn(size, size, device=device)


def _peer(device: torch.device, elements: int) -> Case | NotMeasured:
    reason = probes.why_no_peer() or ("" if device.type == "cuda" else "the CPU is measured here")
    if reason:
        return NotMeasured("peer_copy", reason)
    return Case(
        "peer_copy",
        f"{elements >> 18} MiB between GPUs",
        lambda device: (drawn(elements, device=device), torch.empty(elements, device=_other(device))),
        lambda pair: probes.peer_copy(*pair),
        bytes_moved=4 * elements,
        check=lambda pair, out: (out.to(pair[0].device), pair[0]),
    )


def _other(device: torch.device) -> torch.device:
    return torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())


def _layouts(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Iterator[Case]:
    batch, height, width, channels = shape
    pixels = batch * height * width * dtype.itemsize
    moved = pixels * (channels + blocks_of(channels) * BLOCK)
    text = f"{batch}x{height}x{width}x{channels} {_short(dtype)}"
    make = partial(drawn, *shape, dtype=dtype)
    yield Case(
        "nhwc_to_nchwc16",
        text,
        lambda device: make(device=device),
        nhwc_to_nchwc16,
        bytes_moved=moved,
        check=lambda x, out: (out, nhwc_to_nchwc16(x, path=TORCH).out),
        twins={
            "a plane at a time": nhwc_to_nchwc16_naive,
            "torch permute": lambda x: nhwc_to_nchwc16(x, path=TORCH),
        },
    )
    yield Case(
        "nchwc16_to_nhwc",
        text,
        lambda device: nhwc_to_nchwc16(make(device=device)).out,
        lambda x: nchwc16_to_nhwc(x, channels),
        bytes_moved=moved,
        check=lambda x, out: (out, make(device=x.device)),
        twins={"torch permute": lambda x: nchwc16_to_nhwc(x, channels, path=TORCH)},
    )


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
