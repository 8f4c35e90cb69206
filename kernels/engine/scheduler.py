"""Continuous batching: requests join between decode steps, leave when they are done, and wait while the cache is full.

Admission takes what fits now. When running sequences later need more room than there is, the youngest is preempted: its
pages go back, and it is run again from its prompt and what it has generated so far (over a quantised cache that is not
bit for bit the same: a prefill reads its keys and values before they are quantised). A request that would not fit alone
is refused at once, so that the oldest can always go on: nothing deadlocks. After a preemption nothing is admitted until
a running request ends, lest two requests throw each other out for ever.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral

from torch import Tensor

from spikeprof.kernels.cache.protocol import CacheFull
from spikeprof.kernels.engine.marks import mark
from spikeprof.kernels.engine.runner import Runner
from spikeprof.kernels.engine.sampling import Sampler, Sampling, check_finite
from spikeprof.kernels.paths import check

WAITING, RUNNING, LENGTH, STOP, CANCELLED = "waiting", "running", "length", "stop", "cancelled"


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and what became of it. ``token_times_s`` are of ``time.perf_counter``, one for each generated token.

    ``state``: "waiting", "running", or why it ended: "length", "stop" (the stop token, which is the last of
    ``tokens``), "cancelled".
    """

    id: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_token: int | None
    arrived_s: float
    state: str = WAITING
    tokens: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    preemptions_count: int = 0
    is_queued: bool = False  # or was

    @property
    def is_done(self) -> bool:
        """Whether no more tokens will come."""
        return self.state not in (WAITING, RUNNING)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return self.token_times_s[0] - self.arrived_s if self.token_times_s else None

    @property
    def itl_s(self) -> list[float]:
        """Seconds between tokens, one fewer than there are tokens."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler may do at once.

    Waiting requests are admitted together as soon as ``max_size`` of them wait, or the oldest has waited
    ``max_delay_s``; 0 = at once. A step prefills at most ``max_prefill_tokens``, but at least one request: running
    requests stand still meanwhile.
    """

    max_batch: int
    max_seq_len: int
    cache_tokens: int
    page_tokens: int  # what the cache gives out as one piece
    max_delay_s: float = 0.0
    max_size: int | None = None
    max_prefill_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_seq_len", "cache_tokens", "page_tokens", "max_prefill_tokens"):
            check(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be positive")
        check(0 <= self.max_delay_s < math.inf, f"max_delay_s is {self.max_delay_s}: it must be 0 or more, and finite")
        check(self.max_size is None or self.max_size > 0, f"max_size is {self.max_size}: it must be positive, or None")


class Scheduler:
    """The queue and the running batch over one runner. Not for several threads at a time."""

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self.runner = runner
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.steps_count = 0
        self.preemptions_count = 0
        self._ids = itertools.count()
        self._sampler = Sampler()
        self._is_held = False  # something was preempted, and nothing has ended since

    def make_request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_token: int | None = None,
    ) -> Request:
        """A request that arrives now, not queued yet; any thread may make one.

        Raises ValueError for a prompt that is empty or could never fit, IndexError for token ids out of range.
        """
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"prompt must be a list of token ids: {error}") from None
        self.check_request(ids, max_new_tokens)
        return Request(next(self._ids), ids, max_new_tokens, sampling or Sampling(), stop_token, time.perf_counter())

    def add(self, request: Request) -> None:
        """Queue a request, once. Raises ValueError for one that was queued before."""
        check(not request.is_queued, f"request {request.id} was queued already, and is {request.state}: make another")
        request.is_queued = True
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request and give its pages back; nothing happens where it is done already."""
        if request.state == WAITING:
            if request in self.waiting:
                self.waiting.remove(request)
            request.state = CANCELLED
        elif request.state == RUNNING:
            self._end(request, CANCELLED)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do at all."""
        return not self.waiting and not self.running

    def due_in_s(self) -> float:
        """Seconds until the next step has something to do; infinite when idle."""
        if self.running:
            return 0.0
        if not self.waiting:
            return math.inf
        if self._is_flush_due():
            return 0.0
        return max(0.0, self.waiting[0].arrived_s + self.limits.max_delay_s - time.perf_counter())

    def step(self) -> list[Request]:
        """Admit and prefill what is due, then run one decode step; returns the requests that got a token or more.

        Where a step raises, nobody knows what it has written: what ran is preempted, and is run again by the next one.
        """
        try:
            with mark("step", step=self.steps_count):
                self.steps_count += 1
                served = self._admit()
                served += [request for request in self._decode() if request not in served]
        except BaseException:
            for request in reversed(self.running.copy()):
                self._preempt(request)
            raise
        return served

    def check_request(self, prompt: list[int], max_new_tokens: int) -> None:
        """Raise ValueError or IndexError for a prompt that cannot be run, see ``make_request``."""
        vocabulary, limits = self.runner.decoder.config.vocabulary, self.limits
        check(len(prompt) > 0, "prompt is empty: at least one token is needed")
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise IndexError(f"prompt has the token {wrong}: the vocabulary has 0 to {vocabulary - 1}")
        check(isinstance(max_new_tokens, Integral) and max_new_tokens > 0,
              f"max_new_tokens is {max_new_tokens!r}: it must be a positive integer")  # fmt: skip
        total = len(prompt) + max_new_tokens
        # The last token is never run, so it takes no room in the cache.
        most = min(limits.max_seq_len, limits.cache_tokens + 1)
        check(total <= most, f"the prompt has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}: together "
              f"they can be at most {most}")  # fmt: skip

    def _admit(self) -> list[Request]:
        """Prefill as many of the waiting as are due and fit. Returns those that got their first token."""
        is_blocked = self._is_held and bool(self.running)
        room = self.limits.max_batch - len(self.running)
        if not self.waiting or is_blocked or room < 1 or not self._is_flush_due():
            return []
        chosen = self._candidates(room)
        while chosen:
            try:
                logits = self.runner.prefill(
                    [request.id for request in chosen], [request.prompt + request.tokens for request in chosen]
                )
            except CacheFull:
                chosen.pop()
                continue
            break
        if not chosen:
            check(bool(self.running), "a request that fits the cache alone did not: the cache holds sequences that are "
                  "not this scheduler's")  # fmt: skip
            return []
        for request in chosen:
            self.waiting.popleft()
            request.state = RUNNING
        self.running += chosen
        self._is_held = False
        self._take(chosen, logits)
        return chosen

    def _candidates(self, most: int) -> list[Request]:
        """The first of the waiting that a step may prefill and that would fit without shared pages; one at least."""
        tokens_left, pages_left = self.limits.max_prefill_tokens, self.runner.cache.usage().free_pages_count
        chosen: list[Request] = []
        for request in itertools.islice(self.waiting, most):
            tokens_count = len(request.prompt) + len(request.tokens)
            tokens_left -= tokens_count
            pages_left -= -(-tokens_count // self.limits.page_tokens)
            if chosen and (tokens_left < 0 or pages_left < 0):
                break
            chosen.append(request)
        return chosen

    def _is_flush_due(self) -> bool:
        size = self.limits.max_size or self.limits.max_batch
        oldest = self.waiting[0]
        waited_s = time.perf_counter() - oldest.arrived_s
        return len(self.waiting) >= size or waited_s >= self.limits.max_delay_s or oldest.preemptions_count > 0

    def _decode(self) -> list[Request]:
        """One token for each running request, after making room by preempting the youngest."""
        while self.running:
            batch = list(self.running)
            try:
                logits = self.runner.decode([request.id for request in batch], [r.tokens[-1] for r in batch])
            except CacheFull:
                self._preempt(batch[-1])
                continue
            self._take(batch, logits)
            return batch
        return []

    def _preempt(self, request: Request) -> None:
        self.runner.cache.evict(request.id)
        self.running.remove(request)
        request.state = WAITING
        request.preemptions_count += 1
        self.preemptions_count += 1
        self.waiting.appendleft(request)
        self._is_held = True

    def _take(self, batch: Sequence[Request], logits: Tensor) -> None:
        """Sample a token for each, and end those that are done."""
        with mark("sample", batch=len(batch)):
            tokens = self._sampler(logits, [r.sampling for r in batch], [len(r.tokens) for r in batch]).tolist()
        for request, token in zip(batch, tokens, strict=True):
            check_finite(request.id, token >= 0)
        now = time.perf_counter()
        for request, token in zip(batch, tokens, strict=True):
            request.tokens.append(token)
            request.token_times_s.append(now)
            if token == request.stop_token:
                self._end(request, STOP)
            elif len(request.tokens) == request.max_new_tokens:
                self._end(request, LENGTH)

    def _end(self, request: Request, state: str) -> None:
        self.runner.cache.evict(request.id)
        self.running.remove(request)
        request.state = state
        self._is_held = False
