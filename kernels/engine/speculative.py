"""Speculative decoding: a small model proposes ``k`` tokens, the target judges all of them in one pass.

A proposal x is accepted with probability min(1, p(x) / q(x)), p the target's and q the draft's chance of it; at the
first one refused the token is drawn from max(0, p - q) normalised instead, and where none is refused one more from p.
What comes out is distributed exactly as the target's own sampling (Leviathan, Kalman, Matias 2023, "Fast Inference
from Transformers via Speculative Decoding", theorem 1); greedy, it is the target's own output. Each proposal is judged
by the decode kernels; only a BLAS that rounds otherwise for more rows can turn a tie.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from spikeprof.kernels.engine.engine import Engine, Prompts, as_prompts
from spikeprof.kernels.engine.host import on_device
from spikeprof.kernels.engine.marks import mark
from spikeprof.kernels.engine.runner import Runner
from spikeprof.kernels.engine.sampling import Sampling, check_finite, draw, probabilities, uniform
from spikeprof.kernels.paths import check, check_shape

_DRAFT, _ACCEPT, _NEXT = 1, 2, 3  # streams of random numbers: each use of a position has its own


class Verdict(NamedTuple):
    """How many of each row's proposals were accepted, int64 [rows], and the token that follows those, int64 [rows]."""

    accepted: Tensor
    following: Tensor


@dataclass(slots=True)
class Statistics:
    """What a call did. Seconds are one for each round: proposing, the target's pass, judging and telling the host.

    On a GPU they are measured by events on the stream, and add no waiting.
    """

    proposed_count: int = 0
    accepted_count: int = 0
    generated_count: int = 0
    target_passes_count: int = 0  # times sequences: a pass over a batch of 8 counts as 8
    draft_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)

    @property
    def acceptance_share(self) -> float:
        """Accepted of all proposals; 0 where there were none."""
        return self.accepted_count / self.proposed_count if self.proposed_count else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that one pass of the target gave a sequence; 1 without speculation."""
        return self.generated_count / self.target_passes_count if self.target_passes_count else 0.0


@dataclass(frozen=True, slots=True)
class Speculated:
    """As ``Generated``: ``tokens`` and ``reasons`` of each prompt; and what speculation did.

    ``paths``: of "target" and "draft", which paths each kernel ran on, since the engine was made.
    """

    tokens: list[list[int]]
    reasons: list[str]
    statistics: Statistics
    paths: Mapping[str, Mapping[str, tuple[str, ...]]]


@dataclass(eq=False, slots=True)
class _Sequence:
    id: int
    tokens: list[int]  # with the prompt; the last one is not in the target's cache yet
    prompt_count: int
    sampling: Sampling
    reason: str = ""

    @property
    def generated_count(self) -> int:
        return len(self.tokens) - self.prompt_count


class Speculative:
    """A target and a draft engine over one vocabulary; each keeps its own cache, which must be idle meanwhile."""

    def __init__(self, target: Engine, draft: Engine, *, k: int = 4) -> None:
        check(k > 0, f"k is {k}: at least one token must be proposed")
        ours, theirs = draft.config.vocabulary, target.config.vocabulary
        check(ours == theirs, f"the draft's vocabulary has {ours} tokens, the target's {theirs}: they must be the same")
        devices = [engine.runner.decoder.weights.device for engine in (draft, target)]
        check(devices[0] == devices[1], f"the draft is on {devices[0]}, the target on {devices[1]}: one is wanted")
        self.target, self.draft, self.k = target, draft, k
        self._most_tokens = min(min(e.limits.max_seq_len, e.limits.cache_tokens) for e in (target, draft))

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop_token: int | None = None,
        seed: int = 0,
    ) -> Speculated:
        """As ``Engine.generate``. Prompts run in groups whose longest outcome fits into both caches."""
        sampling, statistics = Sampling(temperature, top_p, seed), Statistics()
        sequences = [
            _Sequence(number, list(prompt), len(prompt), replace(sampling, seed=seed + number))
            for number, prompt in enumerate(as_prompts(prompts))
        ]
        for sequence in sequences:
            for engine in (self.target, self.draft):
                engine.scheduler.check_request(sequence.tokens, max_new_tokens)
        check(self.target.scheduler.is_idle and self.draft.scheduler.is_idle, "an engine has requests of its own")
        with self.target.scope():
            for group in self._groups(sequences, max_new_tokens):
                self._generate(group, max_new_tokens, stop_token, statistics)
        paths = {"target": self.target.paths, "draft": self.draft.paths}
        made = [sequence.tokens[sequence.prompt_count :] for sequence in sequences]
        return Speculated(made, [sequence.reason for sequence in sequences], statistics, paths)

    def _groups(self, sequences: list[_Sequence], max_new_tokens: int) -> list[list[_Sequence]]:
        engines = (self.target, self.draft)
        most = min(engine.limits.max_batch for engine in engines)
        groups: list[list[_Sequence]] = [[]]
        left = [engine.limits.cache_tokens for engine in engines]
        for sequence in sequences:
            tokens = min(len(sequence.tokens) + max_new_tokens + self.k, self._most_tokens)
            need = [-(-tokens // engine.limits.page_tokens) * engine.limits.page_tokens for engine in engines]
            if groups[-1] and (len(groups[-1]) == most or any(n > room for n, room in zip(need, left, strict=True))):
                groups.append([])
                left = [engine.limits.cache_tokens for engine in engines]
            groups[-1].append(sequence)
            left = [room - n for n, room in zip(need, left, strict=True)]
        return groups

    def _generate(
        self, group: list[_Sequence], max_new_tokens: int, stop_token: int | None, statistics: Statistics
    ) -> None:
        begun: list[Runner] = []
        active = list(group)
        try:
            for runner in (self.target.runner, self.draft.runner):
                logits = runner.prefill([s.id for s in group], [s.tokens for s in group])
                begun.append(runner)
                if runner is self.target.runner:
                    first = torch.stack([_choose(logits, group, _NEXT), logits.amax(1).isfinite()], 1)
            for sequence, (token, is_finite) in zip(group, first.tolist(), strict=True):
                check_finite(sequence.id, is_finite)
                self._append(sequence, [token], max_new_tokens, stop_token, statistics)
                statistics.target_passes_count += 1
            while active := [sequence for sequence in active if not sequence.reason]:
                self._round(active, max_new_tokens, stop_token, statistics)
        finally:
            for runner, sequence in itertools.product(begun, group):
                runner.cache.evict(sequence.id)

    def _round(
        self, active: list[_Sequence], max_new_tokens: int, stop_token: int | None, statistics: Statistics
    ) -> None:
        """Propose, verify, commit: each active sequence gets at least one token."""
        # A proposal past the longest sequence's last token would be for nothing, and one past the cache impossible.
        useful = max(max_new_tokens - sequence.generated_count for sequence in active) - 1
        possible = self._most_tokens - max(len(sequence.tokens) for sequence in active)
        k = min(self.k, useful, possible)
        watch = _Stopwatch(self.target.runner.decoder.weights.device)
        with mark("draft", batch=len(active), k=k):
            proposals, chances = self._propose(active, k)
        watch.lap()
        with mark("verify", batch=len(active), k=k):
            last = on_device([s.tokens[-1] for s in active], torch.int64, proposals.device)[:, None]
            rows = torch.cat([last, proposals], 1)
            logits = self.target.runner.extend([s.id for s in active], [k + 1] * len(active), rows.flatten())
        watch.lap()
        with mark("commit", batch=len(active)):
            wanted = probabilities(logits, [s.sampling for s in active for _ in range(k + 1)])
            verdict = judge(
                wanted.view(len(active), k + 1, -1),
                chances,
                proposals,
                [[uniform(s.sampling.seed, len(s.tokens) + i, _ACCEPT) for i in range(k)] for s in active],
                [uniform(s.sampling.seed, len(s.tokens), _NEXT) for s in active],
            )
            finite = logits.view(len(active), -1).amax(1).isfinite()
            told = torch.cat([torch.stack([finite, *verdict], 1), proposals], 1).tolist()
            for sequence, (is_finite, accepted, following, *proposed) in zip(active, told, strict=True):
                check_finite(sequence.id, is_finite)
                statistics.proposed_count += k
                statistics.accepted_count += accepted
                statistics.target_passes_count += 1
                self._append(sequence, [*proposed[:accepted], following], max_new_tokens, stop_token, statistics)
                for cache in (self.target.runner.cache, self.draft.runner.cache):
                    kept = min(cache.length(sequence.id), len(sequence.tokens) - 1)
                    cache.truncate(sequence.id, kept)
        watch.lap()
        for laps, seconds in zip(
            (statistics.draft_s, statistics.verify_s, statistics.commit_s), watch.laps_s(), strict=True
        ):
            laps.append(seconds)

    def _propose(self, active: list[_Sequence], k: int) -> tuple[Tensor, Tensor]:
        """Proposals int64 [rows, k], and what they were drawn from, fp32 [rows, k, vocabulary]."""
        runner = self.draft.runner
        ids = [sequence.id for sequence in active]
        device, vocabulary = runner.decoder.weights.device, self.draft.config.vocabulary
        if k == 0:
            nothing = torch.zeros(len(active), 0, dtype=torch.int64, device=device)
            return nothing, torch.zeros(len(active), 0, vocabulary, device=device)
        # One token, or two where all proposals of the last round were accepted: the draft never ran its own last one.
        missing = [sequence.tokens[runner.cache.length(sequence.id) :] for sequence in active]
        counts = [len(tokens) for tokens in missing]
        logits = runner.extend(ids, counts, [token for tokens in missing for token in tokens])
        logits = logits[on_device(counts, torch.int64, device).cumsum(0) - 1]
        proposals, chances = [], []
        for number in range(k):
            chances.append(probabilities(logits, [sequence.sampling for sequence in active]))
            proposals.append(draw(chances[-1], [
                uniform(s.sampling.seed, len(s.tokens) + number, _DRAFT) for s in active
            ]))  # fmt: skip
            if number + 1 < k:
                logits = runner.decode(ids, proposals[-1])
        return torch.stack(proposals, 1), torch.stack(chances, 1)

    def _append(
        self,
        sequence: _Sequence,
        tokens: Sequence[int],
        max_new_tokens: int,
        stop_token: int | None,
        statistics: Statistics,
    ) -> None:
        """Take tokens over until the sequence ends."""
        for token in tokens:
            sequence.tokens.append(token)
            statistics.generated_count += 1
            if token == stop_token:
                sequence.reason = "stop"
            elif sequence.generated_count == max_new_tokens:
                sequence.reason = "length"
            if sequence.reason:
                return


def judge(
    wanted: Tensor,
    chances: Tensor,
    proposals: Tensor,
    accept_uniforms: Sequence[Sequence[float]],
    next_uniforms: Sequence[float],
) -> Verdict:
    """Exact rejection sampling of ``k`` proposals a row.

    ``wanted`` [rows, k + 1, vocabulary] and ``chances`` [rows, k, vocabulary] are the target's and the draft's
    probabilities, ``proposals`` int64 [rows, k]; the uniforms are numbers in [0, 1), ``k`` and one a row.
    """
    rows, k, vocabulary = chances.shape
    check_shape("wanted", wanted, (rows, k + 1, vocabulary))
    check_shape("proposals", proposals, (rows, k))
    uniforms = on_device(accept_uniforms, torch.float64, wanted.device).view(rows, k)
    p = wanted[:, :k].gather(2, proposals[:, :, None])[:, :, 0].double()
    q = chances.gather(2, proposals[:, :, None])[:, :, 0].double()
    accepted = (uniforms * q < p).long().cumprod(1).sum(1)
    at = accepted[:, None, None].expand(-1, 1, vocabulary)
    target = wanted.gather(1, at)[:, 0]
    # Past the last proposal nothing was proposed: the residual is the target's distribution itself.
    padded = torch.cat([chances, torch.zeros_like(wanted[:, :1])], 1)
    residual = (target - padded.gather(1, at)[:, 0]).clamp_min(0)
    # Where the two are equal but for rounding, a refusal can leave nothing.
    residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, target)
    return Verdict(accepted, draw(residual, next_uniforms))


def _choose(logits: Tensor, sequences: Sequence[_Sequence], stream: int) -> Tensor:
    chances = probabilities(logits, [s.sampling for s in sequences])
    return draw(chances, [uniform(s.sampling.seed, len(s.tokens), stream) for s in sequences])


class _Stopwatch:
    """Times between laps: by events on a GPU's stream, else by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times_s: list[float] = []
        self.lap()

    def lap(self) -> None:
        if self._is_cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._times_s.append(time.perf_counter())

    def laps_s(self) -> list[float]:
        if not self._is_cuda:
            return [after - before for before, after in itertools.pairwise(self._times_s)]
        self._events[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._events)]
