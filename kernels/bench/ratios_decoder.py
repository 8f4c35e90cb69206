"""Claim about a whole decoder: fused operators against separate ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from spikeprof.kernels.bench.ratio import Ours, Ratio, Setting
from spikeprof.kernels.bench.timing import WARM
from spikeprof.kernels.engine.config import ModelConfig, preset
from spikeprof.kernels.engine.engine import Engine
from spikeprof.kernels.engine.model import make_decoder
from spikeprof.kernels.engine.operators import Operators, fused_operators, unfused_operators
from spikeprof.kernels.engine.runner import Runner

_SETS = ("separate", "separate, tiled attention", "fused")


def _decoder(setting: Setting) -> Ours:
    config = ModelConfig(2, 64, 4, 2, 32, 128, 256) if setting.small else preset("1b")
    prompt, batch = (32, 4) if setting.small else (4096, 16)
    engine = Engine(
        config, weights="fp16" if setting.is_gpu else "fp32", max_seq_len=prompt + batch,
        max_batch=batch + 1, device=str(setting.device), cache_tokens=(batch + 1) * (prompt + batch),
    )  # fmt: skip
    made = engine.runner.decoder
    runners = {
        name: Runner(make_decoder(config, made.weights, prompt + batch, operators=operators), engine.runner.cache)
        for name, operators in _operators().items()
    }
    with engine.scope():
        tokens = torch.randint(config.vocabulary, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
        prefills = {name: partial(_prefill, runner, tokens) for name, runner in runners.items()}
        prefill_ns = setting.medians_ns(prefills, WARM)
        peaks = {name: _activations_bytes(setting, call) for name, call in prefills.items()}
        sequences = list(range(batch))
        engine.runner.prefill(sequences, [[place % config.vocabulary] * 8 for place in sequences])
        decodes = {name: partial(_decode, runner, sequences) for name, runner in runners.items()}
        decode_ns = setting.medians_ns(decodes, WARM)
    figures = {}
    texts = []
    for what, values in (("prefill latency", prefill_ns), ("decode latency", decode_ns), ("activations", peaks)):
        if not all(values.values()):
            texts.append(f"{what}: not measured, torch counts the peak of memory on GPUs only")
            continue
        changes = {name: values["fused"] / values[name] - 1 for name in _SETS[:2]}
        texts.append(f"{what} {' / '.join(f'{100 * change:+.0f} %' for change in changes.values())}")
        for name, change in changes.items():
            figures[f"{what} against {name}".replace(", ", " ").replace(" ", "_") + "_share"] = change
    return Ours(
        "; ".join(texts),
        f"against all separate / with tiled attention there too; medians of a prefill of {prompt} tokens and of a "
        f"decode step of {batch}, {config.parameters_count / 1e6:.1f} M parameters, eager; activations: peak beyond "
        "weights and cache. No buffer is kept: torch's allocator reuses what is freed",
        figures,
    )


def _operators() -> dict[str, Operators]:
    fused, separate = fused_operators("auto"), unfused_operators()
    return dict(zip(_SETS, (separate, replace(separate, attend=fused.attend), fused), strict=True))


def _prefill(runner: Runner, tokens: list[int]) -> None:
    name = -1  # of a sequence that no request has
    runner.prefill([name], [tokens])
    runner.cache.evict(name)


def _decode(runner: Runner, sequences: list[int]) -> None:
    """One step, undone afterwards, so that every step is the same."""
    runner.decode(sequences, [1] * len(sequences))
    for sequence in sequences:
        runner.cache.truncate(sequence, runner.cache.length(sequence) - 1)


def _activations_bytes(setting: Setting, call: Callable[[], None]) -> float:
    """The peak of memory beyond what is allocated before the call; 0 where nobody counts it."""
    if not setting.is_gpu:
        return 0.0
    torch.cuda.synchronize(setting.device)
    torch.cuda.reset_peak_memory_stats(setting.device)
    before = torch.cuda.memory_allocated(setting.device)
    call()
    return float(torch.cuda.max_memory_allocated(setting.device) - before)


RATIOS = (
    Ratio(
        "decoder-fusion",
        "operator fusion + buffer reuse in the decoder",
        "peak memory −28 %, latency −26 %",
        _decoder,
    ),
)
