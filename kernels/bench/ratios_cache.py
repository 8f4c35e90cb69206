"""Claims about KV caches: room that is used, sequences that fit, bytes and loss of quantising."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spikeprof.kernels.attention import reference_attention
from spikeprof.kernels.bench import kv_precision
from spikeprof.kernels.bench.case import drawn, relative_error
from spikeprof.kernels.bench.ratio import Ours, Ratio, Setting, percent
from spikeprof.kernels.cache import CacheFull, Usage, bytes_per_token, dequantise, make_cache, quantise
from spikeprof.kernels.engine.config import ModelConfig, preset
from spikeprof.kernels.engine.engine import Engine

_MOST_TOKENS, _ROWS = 4096, 8  # of a sequence; rows of the contiguous cache
_LONG, _SHORT = 0.42, 0.115  # mean length as a share of the longest: the claimed use; eight times as many sequences
_ARRIVALS = 20  # orders of arrival that are tried
_HEAD_DIM = 128
_KINDS = ("int8-values", "int8", "int4")


def _paged(_setting: Setting) -> Ours:
    figures: dict[str, float] = {}
    texts = []
    for name, mean_share in (("long", _LONG), ("short", _SHORT)):
        for kind in ("contiguous", "paged"):
            usages = [_filled(kind, _lengths(mean_share, seed)) for seed in range(_ARRIVALS)]
            used = sum(usage.utilisation_share for usage in usages) / _ARRIVALS
            figures[f"{name}_{kind}_used_share"] = used
            figures[f"{name}_{kind}_sequences"] = sum(usage.sequences_count for usage in usages) / _ARRIVALS
        used_shares = (figures[f"{name}_{kind}_used_share"] for kind in ("contiguous", "paged"))
        counts = (figures[f"{name}_{kind}_sequences"] for kind in ("contiguous", "paged"))
        texts.append(
            f"mean length {percent(mean_share)} of the longest: {' → '.join(map(percent, used_shares))}, "
            f"{' → '.join(f'{count:.0f}' for count in counts)} sequences"
        )
    most = math.floor(_ROWS / _LONG)
    return Ours(
        "; ".join(texts)
        + f". Lengths that fill {_ROWS} rows to {percent(_LONG)} leave room for {most} sequences, not 64",
        f"caches of {_ROWS * _MOST_TOKENS} tokens, pages of 16, filled in order of arrival until one does not fit, "
        f"means of {_ARRIVALS} orders; lengths exponential, cut off at {_MOST_TOKENS}",
        figures,
    )


def _lengths(mean_share: float, seed: int) -> list[int]:
    """Lengths of at most ``_MOST_TOKENS``, exponential and cut off there, with this mean."""
    generator = torch.Generator().manual_seed(seed)
    shares = -torch.log1p(-torch.rand(256, generator=generator, dtype=torch.float64))
    # The mean of min(s E, 1) is s (1 - exp(-1 / s)), which grows with the scale s.
    low, high = 1e-3, 1e3
    for _ in range(60):
        scale = math.sqrt(low * high)
        low, high = (scale, high) if scale * -math.expm1(-1 / scale) < mean_share else (low, scale)
    return [max(1, int(length)) for length in ((shares * low).clamp(max=1.0) * _MOST_TOKENS).tolist()]


def _filled(kind: str, lengths: list[int]) -> Usage:
    """What a cache holds once the next sequence does not fit."""
    cache = make_cache(
        "fp16" if kind == "paged" else kind, layers=1, kv_heads=1, head_dim=16, capacity_tokens=_ROWS * _MOST_TOKENS,
        max_sequences=len(lengths), max_tokens=_MOST_TOKENS, dtype=torch.float16, device="cpu",
    )  # fmt: skip
    for sequence, length in enumerate(lengths):
        try:
            cache.begin(sequence)
        except CacheFull:
            break
        try:
            cache.plan([(sequence, length)])
        except CacheFull:
            cache.evict(sequence)
            break
    return cache.usage()


def _precision(setting: Setting) -> Ours:
    plain = bytes_per_token("fp16", layers=1, kv_heads=1, head_dim=_HEAD_DIM)
    found: dict[str, float] = {
        f"{kind}_saved_share": 1 - bytes_per_token(kind, layers=1, kv_heads=1, head_dim=_HEAD_DIM) / plain
        for kind in _KINDS
    }
    saved = ", ".join(f"{kind} {percent(found[f'{kind}_saved_share'])}" for kind in _KINDS)
    found["int8_key_attention_error"] = _key_error(setting, 8)
    engine, text, how = _model_and_text(setting)
    rows = kv_precision.compare(engine, text)
    table = kv_precision.table_text(rows, "fp32" if engine.runner.decoder.weights.dtype == torch.float32 else "fp16")
    return Ours(
        f"saved with scales of fp16 heads of {_HEAD_DIM}: {saved}; INT8 keys of unit variance change attention by "
        f"{percent(found['int8_key_attention_error'])}\n{table}",
        how,
        found | kv_precision.figures(rows),
    )


def _key_error(setting: Setting, bits: int) -> float:
    """Relative error of attention's output with quantised keys of unit variance, all else in float64."""
    tokens = 64 if setting.small else 2048
    q, k, v = (drawn(1, 4, tokens, _HEAD_DIM, device=setting.device, seed=seed) for seed in range(3))
    exact = reference_attention(q, k, v).out
    return relative_error(reference_attention(q, dequantise(quantise(k, bits)), v).out, exact)


def _model_and_text(setting: Setting) -> tuple[Engine, Sequence[int], str]:
    """The model and the text that were asked for, else random weights and what they make; and what that is."""
    small = ModelConfig(2, 64, 4, 2, 32, 128, 256) if setting.small else preset("100m")
    tokens = len(setting.text) or (96 if setting.small else 512)
    engine = Engine(
        setting.model or small, weights="fp32" if setting.device.type == "cpu" else "fp16", max_seq_len=tokens + 16,
        max_batch=1, device=str(setting.device),
    )  # fmt: skip
    name = f"{setting.model or 'random weights'}, {engine.config.parameters_count / 1e6:.1f} M parameters"
    if setting.text:
        return engine, setting.text, f"{name}; {tokens} tokens of the file"
    with engine.scope():
        text = [1, *engine.generate([1], tokens - 1, temperature=1.0).tokens[0]]
    hint = "" if setting.model else " (--model FOLDER takes a trained one)"
    return engine, text, f"{name}{hint}; {tokens} tokens that it made itself (--tokens FILE takes others)"


RATIOS = (
    Ratio(
        "paged-cache",
        "paged against contiguous KV cache, mixed lengths",
        "memory in use 42 % → 91 %; 8 → 64 concurrent sequences",
        _paged,
    ),
    Ratio(
        "kv-precision",
        "KV precision",
        "INT8 values save at most 25 %, both INT8 50 %, INT4 75 %, less scales; perplexity +0.8 % at most",
        _precision,
    ),
)
