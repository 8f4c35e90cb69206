"""Running a decoder over a cache: prefill of whole prompts, and one query per row for decode.

Only attention knows sequences apart: prefill goes through them, equally long neighbours together; decode hands all to
the cache.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from spikeprof.kernels.cache.protocol import KVCache, Plan
from spikeprof.kernels.engine.config import ModelConfig
from spikeprof.kernels.engine.host import on_device
from spikeprof.kernels.engine.network import Kernels, Network, Step
from spikeprof.kernels.engine.operators import Operators, fused_operators
from spikeprof.kernels.engine.weights import Weights
from spikeprof.kernels.fused import rotary_table
from spikeprof.kernels.paths import check, check_shape, chosen


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model ready to run.

    ``path`` is asked of every kernel; ``paths`` collects which one each ran on, by the kernel's name.
    """

    config: ModelConfig
    weights: Weights
    network: Network
    path: str
    paths: dict[str, set[str]]

    def ran(self, name: str, path: str) -> None:
        """Note the path that a kernel took."""
        self.network.kernels.ran(name, path)


def make_decoder(
    config: ModelConfig,
    weights: Weights,
    max_seq_len: int,
    *,
    path: str = "auto",
    operators: Operators | None = None,
) -> Decoder:
    """A decoder for sequences of at most ``max_seq_len`` tokens, of fused kernels unless other operators are given.

    Raises ValueError for a path that cannot be taken where the weights are.
    """
    chosen(path, weights.embedding)
    table = rotary_table(max_seq_len, config.head_dim, base=config.rope_theta, device=weights.device)
    paths: dict[str, set[str]] = {}

    def ran(name: str, path: str) -> None:
        paths.setdefault(name, set()).add(path)

    network = Network(config, weights, table, Kernels(operators or fused_operators(path), path, ran))
    return Decoder(config, weights, network, path, paths)


def prefill(decoder: Decoder, cache: KVCache, plan: Plan, tokens: Tensor, positions: Tensor) -> Tensor:
    """Run new tokens of each of the plan's sequences, int64 [tokens], at ``positions`` int64 [tokens].

    Returns logits [batch, vocabulary] of each sequence's last token. What a sequence had before, such as a shared
    prefix, is read back from the cache; keys and values of the new tokens are used as they are, before quantising,
    where there was nothing before.
    """
    _check_tokens(plan, tokens, positions)
    ends = list(itertools.accumulate(plan.new_tokens))
    spans, window = _spans(cache, plan), decoder.config.window

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decoder.ran("append", cache.append(layer, plan, k, v, path=decoder.path))
        outs = []
        for span in spans:
            # [sequences, heads, new tokens, head_dim], views of the tokens one after the other
            own_q, own_k, own_v = (
                part[span.begin : span.end].unflatten(0, (-1, span.new)).transpose(1, 2) for part in (q, k, v)
            )
            if span.sequence is not None:
                own_k, own_v = (part[None] for part in cache.gather(layer, span.sequence))
            seen = decoder.network.kernels.operators.attend(own_q, own_k, own_v, window)
            decoder.ran("prefill_attention", seen.path)
            outs.append(seen.out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    last = on_device([end - 1 for end in ends], torch.int64, tokens.device)
    return _logits(decoder, tokens, Step(positions, attend), last)


def decode(decoder: Decoder, cache: KVCache, plan: Plan, tokens: Tensor, positions: Tensor) -> Tensor:
    """Run the next token of each of the plan's sequences, int64 [batch] -> logits [batch, vocabulary]."""
    _check_tokens(plan, tokens, positions)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decoder.ran("append", cache.append(layer, plan, k, v, path=decoder.path))
        seen = cache.attend(layer, plan, q, window=decoder.config.window, path=decoder.path)
        decoder.ran("decode_attention", seen.path)
        return seen.out

    return _logits(decoder, tokens, Step(positions, attend), None)


def extend(decoder: Decoder, cache: KVCache, plan: Plan, tokens: Tensor, positions: Tensor) -> Tensor:
    """Run a few new tokens of each sequence, int64 [tokens] -> logits [tokens, vocabulary] of every one of them.

    Each token is a row of decode attention of its own, which sees its sequence up to itself: so that a guess is judged
    by the arithmetic that would have made it.
    """
    news = on_device(plan.new_tokens, torch.int64, tokens.device)
    rows = replace(
        plan,
        block_table=plan.block_table.repeat_interleave(news, 0, output_size=len(tokens)),
        lengths=(positions + 1).to(torch.int32),
        sequences=tuple(s for s, new in zip(plan.sequences, plan.new_tokens, strict=True) for _ in range(new)),
        new_tokens=(1,) * len(tokens),
    )
    return decode(decoder, cache, rows, tokens, positions)


class _Span(NamedTuple):
    """Tokens [begin, end) of a step: ``new`` of each of some fresh sequences, or those of one that had more before."""

    begin: int
    end: int
    new: int
    sequence: int | None


def _spans(cache: KVCache, plan: Plan) -> list[_Span]:
    """What attention runs at once: neighbours that are fresh and equally long together, others one by one."""
    rows = [
        (new, None if cache.length(sequence) == new else sequence)
        for sequence, new in zip(plan.sequences, plan.new_tokens, strict=True)
    ]
    spans: list[_Span] = []
    for (new, sequence), group in itertools.groupby(rows):
        begin = spans[-1].end if spans else 0
        spans.append(_Span(begin, begin + new * len(list(group)), new, sequence))
    return spans


def _check_tokens(plan: Plan, tokens: Tensor, positions: Tensor) -> None:
    count = len(plan.slots)
    check(count > 0, "plan has no new tokens: at least one is needed")
    check_shape("tokens", tokens, (count,))
    check_shape("positions", positions, (count,))


def _logits(decoder: Decoder, tokens: Tensor, step: Step, rows: Tensor | None) -> Tensor:
    logits: Tensor = decoder.network(tokens, step, rows)
    return logits
