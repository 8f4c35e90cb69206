"""Claim about the request pipe: tensors in shared memory against tensors pickled into queues."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import statistics
import time
from multiprocessing.queues import Queue

import torch
from torch import Tensor

from spikeprof.kernels.bench.ratio import Ours, Ratio, Setting
from spikeprof.kernels.engine.pipe import Address, End, Listener, connect

_IN_FLIGHT = 8
_TIMEOUT_S = 120.0


def _pipe(setting: Setting) -> Ours:
    """One process asks, another answers with the tensor plus one, of the same size."""
    elements, count = (1 << 14, 40) if setting.small else (1 << 20, 500)
    tensor = torch.zeros(elements, dtype=torch.float16)
    context = multiprocessing.get_context("spawn")
    asked, answered = context.Queue(), context.Queue()
    listener = Listener(slots=_IN_FLIGHT, slot_bytes=tensor.numel() * tensor.element_size())
    child = context.Process(target=_answer, args=(listener.address, asked, answered), daemon=True)
    child.start()
    try:
        shared = asyncio.run(asyncio.wait_for(_ask_pipe(listener, tensor, count), _TIMEOUT_S))
        queued = _ask_queues(asked, answered, tensor, count)
    finally:
        listener.close()
        asked.put(None)
        child.join(_TIMEOUT_S)
        if child.is_alive():
            child.kill()
    rate, latency = shared[0] / queued[0], queued[1] / shared[1]
    return Ours(
        f"{rate:.1f} × requests/s ({queued[0]:.0f} → {shared[0]:.0f}); latency / {latency:.1f} "
        f"({1e6 * queued[1]:.0f} → {1e6 * shared[1]:.0f} µs)",
        f"{count} requests of {tensor.numel() * tensor.element_size() >> 10} KiB, answered with as much by another "
        f"process; rate with {_IN_FLIGHT} in flight, median latency with one",
        {
            "times_requests_per_s": rate,
            "latency_ratio": latency,
            "pipe_requests_per_s": shared[0],
            "queues_requests_per_s": queued[0],
            "pipe_latency_s": shared[1],
            "queues_latency_s": queued[1],
        },
    )


async def _ask_pipe(listener: Listener, tensor: Tensor, count: int) -> tuple[float, float]:
    """Requests per second with several in flight, and seconds of one alone."""
    async with await listener.accept() as end:
        for _ in range(_IN_FLIGHT):
            await _once(end, tensor)
        took = []
        for _ in range(count):
            began = time.perf_counter()
            await _once(end, tensor)
            took.append(time.perf_counter() - began)
        began = time.perf_counter()
        for place in range(count + _IN_FLIGHT - 1):
            if place < count:
                await _send(end, tensor)
            if place >= _IN_FLIGHT - 1:
                (await end.receive()).release()
        return count / (time.perf_counter() - began), statistics.median(took)


async def _once(end: End, tensor: Tensor) -> None:
    await _send(end, tensor)
    (await end.receive()).release()


async def _send(end: End, tensor: Tensor) -> None:
    """The request is made in place: what makes it writes it where the other process reads it."""
    slot = await end.reserve(tuple(tensor.shape), tensor.dtype)
    torch.add(tensor, 1, out=slot.tensor)
    slot.send()


def _ask_queues(asked: Queue[bytes | None], answered: Queue[bytes], tensor: Tensor, count: int) -> tuple[float, float]:
    """The same with tensors that are pickled."""

    def send() -> None:
        asked.put(pickle.dumps(tensor + 1))

    def receive() -> None:
        pickle.loads(answered.get(timeout=_TIMEOUT_S))  # of the child that was started here

    for _ in range(_IN_FLIGHT):
        send()
        receive()
    took = []
    for _ in range(count):
        began = time.perf_counter()
        send()
        receive()
        took.append(time.perf_counter() - began)
    began = time.perf_counter()
    for place in range(count + _IN_FLIGHT - 1):
        if place < count:
            send()
        if place >= _IN_FLIGHT - 1:
            receive()
    return count / (time.perf_counter() - began), statistics.median(took)


def _answer(address: Address, asked: Queue[bytes | None], answered: Queue[bytes]) -> None:
    """The other process: the pipe until it closes, then the queues until a None."""
    torch.set_num_threads(1)
    asyncio.run(_answer_pipe(address))
    while (request := asked.get()) is not None:
        answered.put(pickle.dumps(pickle.loads(request) + 1))


async def _answer_pipe(address: Address) -> None:
    async with await connect(address) as end:
        while True:
            try:
                message = await end.receive()
            except ConnectionError:
                return
            with message:
                await _send(end, message.tensor)


RATIOS = (
    Ratio(
        "request-pipe",
        "shared-memory request pipe against pickled queues",
        "3.6 × requests/s, latency / 3.6",
        _pipe,
    ),
)
