"""Claims about serving: padding, and batches that form while requests wait."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from spikeprof.kernels.attention import tiled_attention
from spikeprof.kernels.bench.case import drawn
from spikeprof.kernels.bench.ratio import Ours, Ratio, Setting, percent
from spikeprof.kernels.bench.timing import WARM
from spikeprof.kernels.engine.config import ModelConfig, preset
from spikeprof.kernels.engine.engine import Engine

_BATCH = 8
_MEAN_SHARE = 0.38  # of the longest: 62 % of a static batch are padding
_HEAD_DIM = 64
_KNEE_SHARE = 0.9  # of the highest throughput

Batches = list[list[int]]


def _padding(setting: Setting) -> Ours:
    longest, count, hidden = (48, 16, 128) if setting.small else (2048, 64, 2048)
    lengths = _lengths(longest, count)
    arrival = _batches(lengths)
    batches = {
        "static": arrival,
        "per batch": arrival,
        "sorted": _batches(sorted(lengths)),
    }
    widths = {name: [longest if name == "static" else max(batch) for batch in made] for name, made in batches.items()}
    waste = {name: _waste(made, widths[name]) for name, made in batches.items()}
    weights = _weights(hidden, setting.device)
    calls = {name: partial(_run, weights, widths[name], hidden) for name in batches}
    medians = setting.medians_ns(calls, WARM)
    faster = {name: medians["static"] / medians[name] for name in batches}
    figures = {f"{name.replace(' ', '_')}_wasted_share": share for name, share in waste.items()}
    figures |= {f"{name.replace(' ', '_')}_times_faster": ratio for name, ratio in faster.items()}
    return Ours(
        f"wasted tokens {percent(waste['static'])} → {percent(waste['per batch'])} in order of arrival, "
        f"{faster['per batch']:.1f} × throughput; {percent(waste['sorted'])} where the {count} that wait are sorted, "
        f"{faster['sorted']:.1f} ×",
        f"{count} lengths, exponential, at most {longest}, batches of {_BATCH}; medians of one decoder layer, "
        f"hidden {hidden}, over all batches",
        figures,
    )


def _lengths(longest: int, count: int) -> list[int]:
    """Exponential lengths cut off at the longest, scaled so that their mean is ``_MEAN_SHARE`` of it."""
    generator = torch.Generator().manual_seed(0)
    shares = -torch.log1p(-torch.rand(count, generator=generator, dtype=torch.float64))
    low, high = 1e-3, 1e3
    for _ in range(60):
        scale = (low * high) ** 0.5
        mean = float((shares * scale).clamp(max=1.0).mean())
        low, high = (scale, high) if mean < _MEAN_SHARE else (low, scale)
    return [max(1, round(length)) for length in ((shares * low).clamp(max=1.0) * longest).tolist()]


def _batches(lengths: Sequence[int]) -> Batches:
    return [list(lengths[first : first + _BATCH]) for first in range(0, len(lengths), _BATCH)]


def _waste(batches: Batches, widths: list[int]) -> float:
    """Share of the tokens of padded batches that are padding."""
    padded = sum(len(batch) * width for batch, width in zip(batches, widths, strict=True))
    return 1 - sum(map(sum, batches)) / padded


def _weights(hidden: int, device: torch.device) -> tuple[Tensor, ...]:
    """qkv, output, up and down of a decoder layer."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    shapes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    return tuple(
        drawn(*shape, device=device, dtype=dtype, seed=seed) / shape[0] ** 0.5 for seed, shape in enumerate(shapes)
    )


def _run(weights: tuple[Tensor, ...], widths: list[int], hidden: int) -> None:
    """One layer over all padded batches."""
    qkv, out, up, down = weights
    for width in widths:
        x = torch.zeros(_BATCH, width, hidden, device=qkv.device, dtype=qkv.dtype)
        q, k, v = (x @ qkv).view(_BATCH, width, 3, -1, _HEAD_DIM).permute(2, 0, 3, 1, 4)
        seen = tiled_attention(q, k, v).out.transpose(1, 2).reshape(_BATCH, width, hidden)
        x = x + seen @ out
        x = x + F.silu(x @ up) @ down


def _batching(setting: Setting) -> Ours:
    counts = (1, 4, 16) if setting.small else (1, 16, 100, 500, 1000, 2000, 5000)
    prompt, new = (4, 4) if setting.small else (32, 16)
    config = ModelConfig(2, 64, 4, 2, 32, 128, 256) if setting.small else preset("tiny")
    most = 8 if setting.small else 1024
    engine = Engine(
        config,
        weights="fp16" if setting.is_gpu else "fp32",
        max_seq_len=prompt + new,
        max_batch=most,
        device=str(setting.device),
    )
    _closed(engine, 2, prompt, new)
    rates, p99s = {}, {}
    for count in counts:  # small ones take milliseconds, and any other process shows in them
        runs = [_closed(engine, count, prompt, new) for _ in range(setting.runs if setting.small else 1)]
        rates[count], p99s[count] = (statistics.median(each) for each in zip(*runs, strict=True))
    knee = next(count for count in counts if rates[count] >= _KNEE_SHARE * max(rates.values()))
    low, high = counts[2 if len(counts) > 3 else 0], counts[-1]
    figures = {f"{count}_tokens_per_s": rate for count, rate in rates.items()}
    figures |= {f"{count}_p99_s": p99 for count, p99 in p99s.items()}
    sweep = ", ".join(f"{count}: {rates[count]:.0f} tok/s, P99 {p99s[count]:.2f} s" for count in counts)
    return Ours(
        f"concurrency {low} → {high}: throughput × {rates[high] / rates[low]:.1f}; knee at {knee}; {sweep}",
        f"so many requests at once, prompts of {prompt}, {new} new tokens, {config.parameters_count / 1e6:.1f} M "
        f"parameters, at most {most} in a batch; P99 of a request from its arrival to its end, which beyond the knee "
        "grows with the queue",
        figures | {"knee_concurrency": float(knee)},
    )


def _closed(engine: Engine, count: int, prompt: int, new: int) -> tuple[float, float]:
    """Tokens per second, and P99 of the seconds that a request takes, with ``count`` requests at once."""
    generator = torch.Generator().manual_seed(count)
    prompts = torch.randint(engine.config.vocabulary, (count, prompt), generator=generator).tolist()
    began = time.perf_counter()
    made = engine.generate(prompts, new)
    seconds = time.perf_counter() - began
    took = sorted(first + sum(rest) for first, rest in zip(made.ttft_s, made.itl_s, strict=True))
    return sum(map(len, made.tokens)) / seconds, took[min(count - 1, int(0.99 * count))]


RATIOS = (
    Ratio(
        "padding",
        "padding: per batch against a static maximum",
        "wasted tokens 62 % → 23 %; 2.4 × throughput",
        _padding,
    ),
    Ratio(
        "dynamic-batching",
        "dynamic batching, concurrency 100 → 5,000",
        "throughput up 3.2 ×, P99 bounded; knee shown",
        _batching,
    ),
)
