"""Admission, preemption and room: with small caches, so that they are full all the time."""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from spikeprof.kernels.engine import model, sampling
from spikeprof.kernels.engine.config import ModelConfig
from spikeprof.kernels.engine.engine import Engine
from spikeprof.kernels.engine.sampling import Sampling
from spikeprof.kernels.engine.scheduler import Request, Scheduler

SMALL = ModelConfig(1, 32, 2, 1, 16, 32, 40)


def engine(**options: object) -> Engine:
    return Engine(SMALL, **({"weights": "fp32", "max_seq_len": 64, "max_batch": 8, "device": "cpu"} | options))


def queued(scheduler: Scheduler, prompt: list[int], most: int, **options: float) -> Request:
    request = scheduler.make_request(prompt, most, Sampling(**options))
    scheduler.add(request)
    return request


def test_requests_join_between_steps_and_leave_when_done() -> None:
    run = engine()
    first = queued(run.scheduler, [1, 2], 5)
    assert run.step() == [first]
    assert (first.state, len(first.tokens)) == ("running", 2)
    second = queued(run.scheduler, [3], 2)
    assert set(run.step()) == {first, second}
    assert (len(first.tokens), second.state, len(second.tokens)) == (3, "length", 2)
    run.step()
    run.step()
    assert first.state == "length"
    assert run.scheduler.is_idle
    assert run.step() == []
    assert first.ttft_s is not None
    assert len(first.itl_s) == 4
    assert run.runner.cache.usage().sequences_count == 0


def test_the_youngest_is_preempted_and_its_tokens_are_the_same() -> None:
    requests = [([token] * 10, 30) for token in range(4)]
    roomy, tight = engine(), engine(cache_tokens=64)  # two of 40 tokens would need six pages of 16; there are four
    whole, preempted = ([queued(run.scheduler, *request, temperature=1.0, seed=3) for request in requests]
                        for run in (roomy, tight))  # fmt: skip
    for run in (roomy, tight):
        while not run.scheduler.is_idle:
            run.step()
    assert [request.tokens for request in preempted] == [request.tokens for request in whole]
    assert sum(request.preemptions_count for request in whole) == 0
    assert sum(request.preemptions_count for request in preempted) > 0
    assert preempted[0].preemptions_count == 0  # the oldest always goes on
    assert tight.runner.cache.usage().tokens_count == 0


@pytest.mark.parametrize("kind", ["fp16", "contiguous", "int8"])
def test_many_requests_in_little_room_all_end(kind: str) -> None:
    random.seed(1)
    run = engine(cache_tokens=128, kv_cache=kind, max_batch=6)
    requests = []
    for _ in range(40):
        prompt = [random.randrange(40) for _ in range(random.randrange(1, 40))]
        requests.append(queued(run.scheduler, prompt, random.randrange(1, 64 - len(prompt))))
    steps = 0
    while not run.scheduler.is_idle:
        run.step()
        steps += 1
        assert steps < 3000
        assert len(run.scheduler.running) <= 6
        if steps % 7 == 0:
            run.scheduler.cancel(random.choice(requests))
    for request in requests:
        assert request.state in ("length", "cancelled")
        assert request.state == "cancelled" or len(request.tokens) == request.max_new_tokens
    usage = run.runner.cache.usage()
    assert (usage.sequences_count, usage.free_pages_count) == (0, usage.pages_count)


def test_what_could_never_fit_is_refused() -> None:
    run = engine(cache_tokens=32)
    with pytest.raises(ValueError, match="prompt has 20 tokens and max_new_tokens is 14: together they can be at most"):
        run.generate([1] * 20, 14)
    assert len(run.generate([1] * 20, 13).tokens[0]) == 13  # the last token is not run: 32 are


def test_a_step_prefills_no_more_than_it_may_but_one_at_least() -> None:
    run = engine()
    scheduler = Scheduler(run.runner, type(run.limits)(8, 64, 512, 16, max_prefill_tokens=25))
    requests = [queued(scheduler, [token] * count, 9) for token, count in ((1, 30), (2, 10), (3, 10), (4, 10))]
    counts = []
    for _ in range(3):
        scheduler.step()
        counts.append([request.state for request in requests].count("running"))
    assert counts == [1, 3, 4]
    for request in requests:
        scheduler.cancel(request)


def test_waiting_requests_are_flushed_by_number_or_by_age() -> None:
    run = engine(max_delay_s=30.0, max_size=3)
    two = [queued(run.scheduler, [token], 2) for token in (1, 2)]
    assert run.step() == []
    assert 29 < run.scheduler.due_in_s() <= 30
    third = queued(run.scheduler, [3], 2)
    assert run.scheduler.due_in_s() == 0
    assert run.step() == [*two, third]
    late = queued(run.scheduler, [4], 2)
    late.arrived_s -= 30
    assert run.scheduler.due_in_s() == 0
    assert run.step() == [late]
    assert run.scheduler.due_in_s() == float("inf")


def test_a_delay_of_milliseconds_is_kept() -> None:
    run = engine(max_delay_s=0.02)
    started = time.perf_counter()
    made = run.generate([1], 2)
    assert time.perf_counter() - started >= 0.02
    assert made.ttft_s[0] >= 0.02


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancelling_gives_the_pages_back(steps: int) -> None:
    run = engine()
    request, other = queued(run.scheduler, [1, 2, 3], 20), queued(run.scheduler, [4], 20)
    for _ in range(steps):
        run.step()
    run.scheduler.cancel(request)
    run.scheduler.cancel(request)
    assert request.state == "cancelled"
    assert run.runner.cache.usage().sequences_count == (1 if steps else 0)
    while not run.scheduler.is_idle:
        run.step()
    assert other.state == "length"
    assert run.runner.cache.usage().tokens_count == 0


def test_what_was_preempted_waits_for_no_delay() -> None:
    run = engine(max_delay_s=30.0)
    request = queued(run.scheduler, [1], 4)
    assert run.scheduler.due_in_s() > 29
    request.preemptions_count = 1
    assert run.scheduler.due_in_s() == 0


def test_waiting_for_others_takes_no_time_of_the_processor() -> None:
    run = engine(max_delay_s=0.1)
    began = time.thread_time()
    run.generate([1], 1)
    assert time.thread_time() - began < 0.05
    assert run.scheduler.steps_count <= 3


def test_a_request_is_queued_once() -> None:
    run = engine()
    request = queued(run.scheduler, [1], 2)
    with pytest.raises(ValueError, match="request 0 was queued already, and is waiting: make another"):
        run.scheduler.add(request)
    run.step()
    with pytest.raises(ValueError, match="request 0 was queued already, and is length: make another"):
        run.scheduler.add(request)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_told(temperature: float) -> None:
    run = engine()
    run.runner.decoder.weights.norm[3] = float("nan")
    for _ in range(2):
        with pytest.raises(FloatingPointError, match=r"logits of sequence . have NaN or infinity: weights are damaged"):
            run.generate([[1, 2], [3]], 4, temperature=temperature)
        assert run.scheduler.is_idle
        assert run.runner.cache.usage().sequences_count == 0


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_right_after_steps_that_raised(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(seed)
    asked = [([source.randrange(40) for _ in range(source.randint(1, 12))], source.randint(1, 9)) for _ in range(6)]
    whole, broken = engine(), engine(max_batch=3, page_size=4)
    want = [whole.generate(*request).tokens[0] for request in asked]
    requests = [queued(broken.scheduler, *request) for request in asked]
    while not broken.scheduler.is_idle:
        with monkeypatch.context() as patch:
            if source.random() < 0.4:
                where, name = source.choice([(model, "prefill"), (model, "decode"), (sampling, "sample")])
                function, is_late = getattr(where, name), source.random() < 0.5

                def failing(*arguments: object, function=function, is_late=is_late) -> None:
                    if is_late:
                        function(*arguments)
                    raise MemoryError("the device is full")

                patch.setattr(where, name, failing)
            with contextlib.suppress(MemoryError):
                broken.step()
    assert [request.tokens for request in requests] == want
    assert broken.runner.cache.usage().sequences_count == 0
