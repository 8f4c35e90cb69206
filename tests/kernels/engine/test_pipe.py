"""The pipe between real processes; the other side is spawned, so that it inherits nothing by accident."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch

from spikeprof.kernels.engine import pipe
from spikeprof.kernels.engine.pipe import Address, End, Listener, PeerGone, connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pipe needs Linux")
FORK = multiprocessing.get_context("fork")  # quick; nothing here runs threads of its own when it forks


MADE: set[str] = set()  # segments of this process; others on this machine come and go


class Noted(SharedMemory):
    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        MADE.add(self.name)


@pytest.fixture(autouse=True)
def _segments_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "SharedMemory", Noted)


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@asynccontextmanager
async def pair(slots: int = 4, slot_bytes: int = 1024) -> AsyncIterator[tuple[End, End]]:
    listener = Listener(slots=slots, slot_bytes=slot_bytes)
    async with asyncio.timeout(20):
        here, there = await asyncio.gather(listener.accept(), connect(listener.address))
        async with here, there:
            yield here, there


def run(main: Callable[[], object]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]
    assert not MADE & segments()


async def serve(target: Callable[..., None], **sizes: int) -> tuple[End, BaseProcess]:
    """A pipe to a process that runs ``target(address)``."""
    listener = Listener(**sizes)
    process = FORK.Process(target=target, args=(listener.address,), daemon=True)
    process.start()
    async with asyncio.timeout(20):
        return await listener.accept(), process


def double(address: Address) -> None:
    """Answers each tensor with twice of it, until the other side leaves."""

    async def main() -> None:
        async with await connect(address) as end:
            while True:
                try:
                    message = await end.receive()
                except PeerGone:
                    return
                slot = await end.reserve(tuple(message.tensor.shape), message.tensor.dtype)
                torch.mul(message.tensor, 2, out=slot.tensor)
                message.release()
                slot.send(message.tag + 100)

    asyncio.run(main())


def test_requests_and_answers_between_processes() -> None:
    async def main() -> None:
        end, process = await serve(double, slots=3, slot_bytes=4096)
        async with asyncio.timeout(20), end:
            for number in range(20):  # several times around the ring
                x = torch.arange(number * 3, dtype=torch.float32).view(number, 3) if number else torch.tensor(2.0)
                await end.send(x, tag=number)
                with await end.receive() as answer:
                    assert torch.equal(answer.tensor, x * 2)
                    assert answer.tag == number + 100
        process.join(20)
        assert process.exitcode == 0

    run(main)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_shapes(dtype: torch.dtype) -> None:
    async def main() -> None:
        async with pair() as (here, there):
            for shape in ((), (0, 3), (2, 3, 1, 4), (7,)):
                x = torch.ones(shape).to(dtype)
                await here.send(x, tag=-5)
                message = await there.receive()
                assert (message.tensor.dtype, message.tensor.shape, message.tag) == (dtype, x.shape, -5)
                assert torch.equal(message.tensor, x)
                message.release()

    run(main)


def test_nothing_is_copied() -> None:
    async def main() -> None:
        async with pair() as (here, there):
            slot = await here.reserve((4,), torch.int32)
            slot.tensor.fill_(1)
            slot.send()
            message = await there.receive()
            slot.tensor[2] = 9  # not allowed, but shows that both look at the same memory
            assert message.tensor.tolist() == [1, 1, 9, 1]
            assert message.tensor.data_ptr() % 64 == 0
            assert message.tensor.numpy().base is not None
            message.release()

    run(main)


def test_a_full_ring_makes_the_sender_wait() -> None:
    async def main() -> None:
        async with pair(slots=2) as (here, there):
            for number in range(2):
                await here.send(torch.tensor([number]))
            third = asyncio.create_task(here.send(torch.tensor([2])))
            await asyncio.sleep(0.05)
            assert not third.done()
            first, second = await there.receive(), await there.receive()
            second.release()  # the ring's order counts: the first one's slot is the next
            await asyncio.sleep(0.05)
            assert not third.done()
            assert first.tensor.tolist() == [0]
            first.release()
            first.release()
            await third
            message = await there.receive()
            assert message.tensor.tolist() == [2]
            message.release()

    run(main)


def test_a_dropped_slot_is_passed_over() -> None:
    async def main() -> None:
        async with pair(slots=2) as (here, there):
            for number in range(5):
                (await here.reserve((1,), torch.int64)).drop()
                await here.send(torch.tensor([number]))
                with await there.receive() as message:
                    assert message.tensor.tolist() == [number]
            slot = await here.reserve((1,), torch.int64)
            slot.send()
            with pytest.raises(ValueError, match="the slot was sent or dropped already"):
                slot.drop()
            with pytest.raises(RuntimeError):
                await here.send(torch.empty(3, device="meta"))
            (await there.receive()).release()
            await here.send(torch.tensor([7]))
            assert (await there.receive()).tensor.tolist() == [7]

    run(main)


def test_leaving_ends_the_others_waits_after_what_was_sent() -> None:
    async def main() -> None:
        async with pair() as (here, there):
            await here.send(torch.tensor([1]))
            waiting = asyncio.create_task(here.receive())
            await asyncio.sleep(0.01)
            here.close()
            here.close()
            with pytest.raises(PeerGone, match="this end was closed"):
                await waiting
            kept = (await there.receive()).tensor
            with pytest.raises(PeerGone, match="the other side is gone, and all that it sent was received"):
                await there.receive()
            with pytest.raises(PeerGone, match="the other side is gone: nobody would read it"):
                await there.reserve((1,), torch.int64)
            there.close()
            assert kept.tolist() == [1]  # a view stays readable

    run(main)


def stall(address: Address) -> None:
    """Takes one message and keeps it; sends one; then waits for ever."""

    async def main() -> None:
        end = await connect(address)
        message = await end.receive()
        await end.send(message.tensor)
        await asyncio.sleep(600)

    asyncio.run(main())


def test_a_killed_peer_leaves_nothing_behind_and_nobody_waiting() -> None:
    async def main() -> None:
        end, process = await serve(stall, slots=1, slot_bytes=64)
        # A process forked later holds a copy of the socket: its end alone would not be noticed.
        bystander = FORK.Process(target=signal.pause, daemon=True)
        bystander.start()
        async with asyncio.timeout(20), end:
            await end.send(torch.tensor([5]))
            first = await end.receive()
            waits = [asyncio.create_task(end.receive()), asyncio.create_task(end.reserve((1,), torch.int64))]
            await asyncio.sleep(0.05)
            assert not any(wait.done() for wait in waits)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            for wait in waits:
                with pytest.raises(PeerGone):
                    await wait
            assert first.tensor.tolist() == [5]
            first.release()
        process.join(20)
        bystander.kill()
        bystander.join(20)

    run(main)


OWNER = """
import asyncio, pickle, sys, torch
from spikeprof.kernels.engine.pipe import Listener

async def main():
    listener = Listener(slots=2, slot_bytes=64)
    sys.stdout.buffer.write(pickle.dumps(listener.address)); sys.stdout.flush()
    if sys.argv[1] == "accept":
        end = await listener.accept()
        await end.send(torch.tensor([3]))
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["accept", "alone"])
def test_a_killed_owner_leaves_no_segment(when: str) -> None:
    async def main() -> None:
        with subprocess.Popen([sys.executable, "-c", OWNER, when], stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            address = pickle.load(owner.stdout)
            assert address.segment in segments()
            if when == "alone":
                owner.kill()
                owner.wait(20)
            async with asyncio.timeout(20):
                if when == "accept":
                    async with await connect(address) as end:
                        with await end.receive() as message:
                            assert message.tensor.tolist() == [3]
                        assert address.segment not in segments()  # the name went when both had it mapped
                        owner.kill()
                        with pytest.raises(PeerGone):
                            await end.receive()
                else:
                    with pytest.raises(PeerGone, match="nobody listens"):
                        await connect(address)
                while address.segment in segments():  # multiprocessing's resource tracker takes its time
                    await asyncio.sleep(0.02)

    run(main)


def test_a_listener_that_nobody_connects_to() -> None:
    async def main() -> None:
        listener = Listener(slots=1, slot_bytes=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await listener.accept()
        listener.close()

    run(main)


def test_more_than_there_is_room_for_is_told_at_once() -> None:
    for slot_bytes in (1 << 45, 1 << 60):
        with pytest.raises(
            OSError, match=rf"1 slots of {slot_bytes} bytes, twice, need \d+ bytes of /dev/shm: \d+ are"
        ):
            Listener(slots=1, slot_bytes=slot_bytes)
    assert not MADE & segments()


def test_sizes_that_cannot_be() -> None:
    for sizes, problem in (({"slots": 0}, "slots is 0"), ({"slot_bytes": 0}, "slot_bytes is 0")):
        with pytest.raises(ValueError, match=problem):
            Listener(**sizes)

    async def main() -> None:
        async with pair(slot_bytes=16) as (here, _):
            with pytest.raises(ValueError, match=r"shape \[3\] of torch.int64 needs 24 bytes: a slot has 16"):
                await here.reserve((3,), torch.int64)
            with pytest.raises(ValueError, match=r"dtype is torch.complex64: a pipe takes torch.uint8"):
                await here.reserve((1,), torch.complex64)
            with pytest.raises(ValueError, match="shape has 9 dimensions: a pipe takes at most 8"):
                await here.reserve((1,) * 9, torch.uint8)

    run(main)


@pytest.mark.parametrize("shape", [(-1,), (-1, -2), (1.5,), (0, 1 << 63)], ids=str)
def test_a_shape_that_cannot_be_takes_no_slot(shape: tuple[int, ...]) -> None:
    async def main() -> None:
        async with pair(slots=1) as (here, there):
            with pytest.raises(ValueError, match=r"shape is \[.*\]: sizes must be whole numbers, 0 or more"):
                await here.reserve(shape, torch.int64)
            await here.send(torch.ones(2), 5)
            assert (await there.receive()).tag == 5

    run(main)


@pytest.mark.parametrize("tag", [1 << 63, 1.5])
def test_a_tag_that_cannot_be_leaves_the_slot_to_be_sent_or_dropped(tag: int) -> None:
    async def main() -> None:
        async with pair(slots=3) as (here, there):
            slot = await here.reserve((1,), torch.int64)
            with pytest.raises(ValueError, match=r"tag is .*: it must be an int of 64 bits"):
                slot.send(tag)
            with pytest.raises(ValueError, match=r"tag is .*: it must be an int of 64 bits"):
                await here.send(torch.ones(1), tag)
            slot.tensor.fill_(3)
            slot.send(-1)
            await here.send(torch.ones(1), 7)
            with await there.receive() as first:
                assert (first.tag, first.tensor.tolist()) == (-1, [3])
            assert (await there.receive()).tag == 7

    run(main)
