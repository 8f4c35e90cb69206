"""Claims about single kernels: fusion, layout, bank conflicts, attention's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spikeprof.kernels import probes
from spikeprof.kernels.attention import naive_attention, tiled_attention
from spikeprof.kernels.bench.case import drawn
from spikeprof.kernels.bench.ratio import Ours, Ratio, Setting, not_measured, percent
from spikeprof.kernels.bench.timing import WARM
from spikeprof.kernels.fused.gelu_dropout import gelu_dropout, gelu_dropout_unfused
from spikeprof.kernels.layout import BLOCK, blocks_of, nhwc_to_nchwc16, nhwc_to_nchwc16_naive
from spikeprof.kernels.probes.transpose import TILES, ways

_P = 0.1
_MASK_BYTES = 1  # an element of the mask that torch's dropout stores


def _gelu_dropout(setting: Setting) -> Ours:
    shape, dtype = ((64, 512), torch.float32) if setting.small else ((16384, 8192), torch.float16)
    x = drawn(*shape, device=setting.device, dtype=dtype)
    medians = setting.medians_ns(
        {"fused": lambda: gelu_dropout(x, _P, seed=1), "separate": lambda: gelu_dropout_unfused(x, _P)}
    )
    one_way = x.numel() * x.element_size()
    fused_share = _of_copy(setting, 2 * one_way, medians["fused"])
    separate_share = _of_copy(setting, 4 * one_way + x.numel() * _MASK_BYTES, medians["separate"])
    faster = medians["separate"] / medians["fused"]
    return Ours(
        f"{faster:.1f} × throughput; DRAM rate {percent(separate_share)} → {percent(fused_share)} of the copy's",
        f"medians, {_dims(x)}, p {_P}; separate: torch's two kernels, their own traffic with the stored mask",
        {"times_faster": faster, "separate_copy_share": separate_share, "fused_copy_share": fused_share},
    )


def _layout(setting: Setting) -> Ours:
    shape, dtype = ((2, 8, 8, 40), torch.float32) if setting.small else ((64, 112, 112, 64), torch.float16)
    x = drawn(*shape, device=setting.device, dtype=dtype)
    medians = setting.medians_ns({"tiles": lambda: nhwc_to_nchwc16(x), "planes": lambda: nhwc_to_nchwc16_naive(x)})
    moved = x.numel() // shape[3] * (shape[3] + blocks_of(shape[3]) * BLOCK) * x.element_size()
    naive, tiled = (_of_copy(setting, moved, medians[name]) for name in ("planes", "tiles"))
    return Ours(
        f"effective bandwidth {percent(naive)} → {percent(tiled)} of the copy's; L2 misses: counters are needed",
        f"medians, {_dims(x)}; before: a plane of one channel at a time. Misses: spikeprof run --counters -- "
        "python -m spikeprof.kernels.bench nhwc",
        {"naive_copy_share": naive, "tiled_copy_share": tiled, "times_faster": medians["planes"] / medians["tiles"]},
    )


def _bank_conflicts(setting: Setting) -> Ours:
    conflicts = {tile: ways(tile) for tile in TILES}
    text = f"{conflicts['conflicting']}-way → {conflicts['padded']}-way"
    how = "ways: from the indices of the tiles"
    figures = {f"{tile}_ways": float(count) for tile, count in conflicts.items()}
    reason = probes.why_no_nvrtc() or ("" if setting.is_gpu else "the CPU has no shared memory")
    if reason:
        return Ours(f"{text}; time not measured: {reason}", how, figures)
    size = 2048
    x = drawn(size, size, device=setting.device)
    medians = setting.medians_ns({tile: _transposed(x, tile) for tile in TILES}, WARM)
    for tile in ("padded", "swizzled"):
        figures[f"{tile}_times_faster"] = medians["conflicting"] / medians[tile]
    return Ours(
        f"{text}; {figures['padded_times_faster']:.1f} × faster padded, {figures['swizzled_times_faster']:.1f} × "
        "swizzled",
        f"{how}; medians of transposes {_dims(x)}, warm L2",
        figures,
    )


def _transposed(x: Tensor, tile: str) -> Callable[[], object]:
    return lambda: probes.transpose(x, tile)


def _attention_memory(setting: Setting) -> Ours:
    if not setting.is_gpu:
        return not_measured("torch counts the peak of memory on GPUs only")
    lengths = (256, 512) if setting.small else (4096, 8192, 16384, 32768, 65536, 131072)
    tiled = {length: _peak_bytes(setting, tiled_attention, length) for length in lengths}
    naive = {length: _peak_bytes(setting, naive_attention, length) for length in lengths[:2]}
    first, last = lengths[0], lengths[-1]
    figures = {f"tiled_{length}_bytes": float(size) for length, size in tiled.items()}
    figures |= {f"naive_{length}_bytes": float(size) for length, size in naive.items()}
    return Ours(
        f"tokens × {last // first}: memory × {tiled[last] / tiled[first]:.1f} ({tiled[first] / 2**20:.0f} → "
        f"{tiled[last] / 2**20:.0f} MiB); naive, tokens × 2: × {naive[lengths[1]] / naive[first]:.1f} "
        f"({naive[first] / 2**20:.0f} → {naive[lengths[1]] / 2**20:.0f} MiB)",
        f"peak allocated beyond q, k, v; 8 heads of 128, fp16, causal, {first} to {last} tokens",
        figures,
    )


def _peak_bytes(setting: Setting, attend: Callable[..., object], tokens: int) -> int:
    """Bytes that attention needs at its peak beyond its inputs: the output, and what it makes on the way."""
    q, k, v = (drawn(1, 8, tokens, 128, device=setting.device, dtype=torch.float16, seed=seed) for seed in range(3))
    torch.cuda.synchronize(setting.device)
    torch.cuda.reset_peak_memory_stats(setting.device)
    before = int(torch.cuda.memory_allocated(setting.device))
    attend(q, k, v)
    return int(torch.cuda.max_memory_allocated(setting.device)) - before


def _of_copy(setting: Setting, moved: int, ns: float) -> float:
    return 1e9 * moved / ns / setting.peaks.copy_bytes_per_s


def _dims(x: Tensor) -> str:
    return f"{' × '.join(map(str, x.shape))} {str(x.dtype).removeprefix('torch.')}"


RATIOS = (
    Ratio(
        "gelu-dropout",
        "GELU + dropout: one kernel against separate ones",
        "2.3 × throughput; DRAM rate 68 % → 92 %",
        _gelu_dropout,
    ),
    Ratio(
        "layout",
        "layout NHWC → NCHWc16",
        "effective bandwidth 67 % → 92 %; L2 miss 12.7 % → 3.2 %",
        _layout,
    ),
    Ratio("attention-memory", "attention memory, 4 K → 128 K tokens", "linear, not quadratic", _attention_memory),
    Ratio(
        "bank-conflicts",
        "shared-memory bank conflicts: padded or swizzled against naive",
        "3.9-way → at most 1.05-way; 1.5 × faster",
        _bank_conflicts,
    ),
)
