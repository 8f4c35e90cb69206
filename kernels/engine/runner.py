"""A decoder with its KV cache: host-side steps over sequences, from lists of token ids to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spikeprof.kernels.cache.protocol import KVCache
from spikeprof.kernels.engine import model
from spikeprof.kernels.engine.graph import DecodeGraphs
from spikeprof.kernels.engine.host import on_device
from spikeprof.kernels.engine.marks import mark
from spikeprof.kernels.engine.model import Decoder


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs steps; ``graphs`` replays decode where there are some. Not for several threads at a time."""

    decoder: Decoder
    cache: KVCache
    graphs: DecodeGraphs | None = None

    def prefill(self, sequences: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Take up sequences with these tokens -> logits [batch, vocabulary] after each.

        Raises CacheFull where there is no room for all. When it raises, none was taken up.
        """
        new, begun = [], []
        tokens: list[int] = []
        positions: list[int] = []
        try:
            for sequence, prompt in zip(sequences, prompts, strict=True):
                known = self.cache.begin(sequence, prompt)
                begun.append(sequence)
                new.append((sequence, len(prompt) - known))
                tokens += prompt[known:]
                positions += range(known, len(prompt))
            plan = self.cache.plan(new)
            with mark("prefill", batch=len(new), tokens=len(tokens)):
                return model.prefill(self.decoder, self.cache, plan, self._ids(tokens), self._ids(positions))
        except BaseException:
            for sequence in begun:
                self.cache.evict(sequence)
            raise

    def decode(self, sequences: Sequence[int], tokens: Sequence[int] | Tensor) -> Tensor:
        """Add the next token of each sequence, a list or int64 [batch] -> logits [batch, vocabulary].

        With graphs the logits are overwritten by the next call. Raises CacheFull; then nothing was changed.
        """
        positions = [self.cache.length(sequence) for sequence in sequences]
        plan = self.cache.plan([(sequence, 1) for sequence in sequences])
        ids, at = self._ids(tokens), self._ids(positions)
        with mark("decode", batch=len(positions)):
            if self.graphs is not None:
                return self.graphs.decode(plan, ids, at)
            return model.decode(self.decoder, self.cache, plan, ids, at)

    def extend(self, sequences: Sequence[int], counts: Sequence[int], tokens: Sequence[int] | Tensor) -> Tensor:
        """Add ``counts`` new tokens to each sequence, one sequence's after the other's in ``tokens``.

        Returns logits [tokens, vocabulary] of every one of them. Raises CacheFull; then nothing was changed.
        """
        positions: list[int] = []
        for sequence, count in zip(sequences, counts, strict=True):
            length = self.cache.length(sequence)
            positions += range(length, length + count)
        plan = self.cache.plan(list(zip(sequences, counts, strict=True)))
        with mark("extend", batch=len(counts), tokens=len(positions)):
            return model.extend(self.decoder, self.cache, plan, self._ids(tokens), self._ids(positions))

    def _ids(self, values: Sequence[int] | Tensor) -> Tensor:
        if isinstance(values, Tensor):
            return values
        return on_device(values, torch.int64, self.decoder.weights.device)
