"""Programs under test: each is run in a process of its own, as ``python programs.py NAME …``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))


def guest(steps: int = 4) -> None:
    """Own steps, then two sessions of torch.profiler, own steps again; prints what the guest saw."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from workload import Workload

    work = Workload()
    seen = []
    work.step()
    torch.cuda.synchronize()
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as session:
            for _ in range(steps):
                work.step()
            torch.cuda.synchronize()
        events = session.profiler.kineto_results.events()
        launches = {
            e.correlation_id(): e.start_ns()
            for e in events
            if "aunch" in e.name() and e.device_type() != torch.autograd.DeviceType.CUDA
        }
        kernels = [
            e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA and "ynchronize" not in e.name()
        ]
        delays = [e.start_ns() - launches[e.correlation_id()] for e in kernels if e.correlation_id() in launches]
        seen.append({"kernels": len(kernels), "linked": len(delays), "min_delay_ns": min(delays)})
    resumed = time.time_ns()
    for _ in range(steps):
        work.step()
    torch.cuda.synchronize()
    print(json.dumps({"sessions": seen, "resumed_ns": resumed, "ended_ns": time.time_ns()}))


def killed(steps: int = 400) -> None:
    """Work for a while, write down the time after each synchronised step, then SIGKILL ourselves."""
    import torch
    from workload import Workload

    work = Workload()
    done = []
    for _ in range(steps):
        work.step()
        torch.cuda.synchronize()
        done.append(time.time_ns())
    print(json.dumps(done), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def replays(count: int = 200) -> None:
    """CUDA-graph replays between cudaProfilerStart and Stop."""
    import torch
    from workload import Workload

    work = Workload()
    for _ in range(10):
        work.replay()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for _ in range(count):
        work.replay()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    for _ in range(10):
        work.replay()
    torch.cuda.synchronize()


def memory_patterns(rounds: int = 60, repeat: int = 40) -> None:
    """Kernels of known patterns of memory use, each alone for some milliseconds; so often that samples meet all."""
    import torch

    half = {"device": "cuda", "dtype": torch.float16}
    large, out = torch.ones(2**28, **half), torch.empty(2**28, **half)  # 512 MiB each: far beyond L2
    some, more = torch.ones(2**25, **half), torch.empty(2**25, **half)  # 64 MiB each: together twice an H200's L2
    index = torch.randint(0, 2**28, (2**24,), device="cuda")
    values = torch.ones(2**24, **half)
    for _ in range(rounds):
        for _ in range(repeat):
            torch.mul(large, 2, out=out)
        for _ in range(repeat):
            large[index]
        for _ in range(repeat):
            out[index] = values
        for _ in range(repeat * 4):
            torch.sin(some, out=more)
            torch.cos(more, out=some)
        torch.cuda.synchronize()


def steady(steps: int = 300, replays: int = 0) -> None:
    """Eager steps, and replays: as many, where no number of them is given."""
    import torch
    from workload import Workload

    work = Workload()
    for _ in range(steps):
        work.step()
    for _ in range(replays or steps):
        work.replay()
    torch.cuda.synchronize()
    print("done", steps)


def flips(seconds: int = 4) -> None:
    """Eager launches as fast as they go, while another thread switches recording every 3 ms; prints how often."""
    import threading

    import torch
    from _spikeprof.hooks import the_agent

    agent, over, count = the_agent(), threading.Event(), 0

    def flip() -> None:
        nonlocal count
        while not over.wait(0.003):
            count += 1
            agent.set_condition("off", "a test" if count % 2 else None)
        agent.set_condition("off", None)

    x = torch.ones(1000, device="cuda")
    thread = threading.Thread(target=flip)
    thread.start()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(100):
            x.add_(1)
        torch.cuda.synchronize()
    over.set()
    thread.join()
    print(count)


def workers(count: int = 2) -> None:
    """Spawned workers that use CUDA, and forked ones that do not."""
    import multiprocessing

    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=_worker, args=(n,)) for n in range(count)]
    fork = multiprocessing.get_context("fork").Process(target=os.getpid)
    for child in (*children, fork):
        child.start()
    for child in (*children, fork):
        child.join()
    print([child.exitcode for child in children])


def ranks() -> None:
    """One rank of several, as torchrun starts it: products and an all-reduce; ranks share a GPU if they must."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    dist.init_process_group("nccl" if gpus > 1 else "gloo")
    a = torch.randn(1024, 1024, device="cuda")
    for _ in range(20):
        dist.all_reduce(a @ a)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def _worker(number: int) -> None:
    import torch

    a = torch.randn(256, 256, device="cuda")
    for _ in range(50 + number):
        a = a @ a
    torch.cuda.synchronize()


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    programs = (flips, guest, killed, memory_patterns, ranks, replays, steady, workers)
    {program.__name__: program for program in programs}[name](*map(int, numbers))
