from __future__ import annotations

import asyncio
import gc

import pytest

from spikeprof.kernels.engine.batching import Server
from spikeprof.kernels.engine.config import ModelConfig
from spikeprof.kernels.engine.engine import Engine

SMALL = ModelConfig(1, 32, 2, 1, 16, 32, 40)
PROMPTS = [[n % 40, (n * 7) % 40, 3] for n in range(24)]


def engine(**options: object) -> Engine:
    return Engine(SMALL, **({"weights": "fp32", "max_seq_len": 64, "max_batch": 8, "device": "cpu"} | options))


def used(run: Engine) -> tuple[int, int]:
    usage = run.runner.cache.usage()
    return usage.sequences_count, usage.tokens_count


async def until_idle(run: Engine) -> None:
    async with asyncio.timeout(20):
        while not run.scheduler.is_idle:
            await asyncio.sleep(0.005)


def test_many_tasks_get_their_own_tokens() -> None:
    run = engine(cache_tokens=160)

    async def ask(server: Server, prompt: list[int], most: int) -> list[int]:
        return [token async for token in server.submit(prompt, most)]

    async def main() -> list[list[int]]:
        async with asyncio.timeout(60), Server(run) as server:
            return await asyncio.gather(*(ask(server, prompt, 5 + n) for n, prompt in enumerate(PROMPTS)))

    found = asyncio.run(main())
    assert found == [engine().generate(prompt, 5 + n).tokens[0] for n, prompt in enumerate(PROMPTS)]
    assert used(run) == (0, 0)


def test_cancelled_requests_give_their_pages_back() -> None:
    run = engine()

    async def consume(server: Server) -> None:
        async for _ in server.submit([1, 2, 3], 60):
            pass

    async def main() -> None:
        async with asyncio.timeout(60), Server(run) as server:
            task = asyncio.create_task(consume(server))  # a task that is cancelled while it waits
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until_idle(run)
            assert used(run) == (0, 0)

            async for _ in server.submit([1, 2, 3], 60):  # left early
                break
            gc.collect()
            await until_idle(run)

            tokens = server.submit([1, 2, 3], 60)  # never begun
            await tokens.aclose()
            await tokens.aclose()
            await until_idle(run)
            assert [token async for token in tokens] == tokens.request.tokens
            assert tokens.request.state == "cancelled"

            async with server.submit([4], 60) as tokens:
                assert await anext(tokens) in range(40)
            await until_idle(run)
            assert tokens.request.state == "cancelled"
            assert used(run) == (0, 0)
            server.submit([4], 60)  # nobody wants it
            last = server.submit([5], 60)  # still open when the server is left
        assert last.request.state == "cancelled"
        assert [token async for token in last] == last.request.tokens

    asyncio.run(main())
    assert used(run) == (0, 0)


def test_requests_wait_for_others_as_long_as_they_may() -> None:
    run = engine(max_delay_s=0.1, max_size=3)
    seen = []
    prefill = run.runner.prefill

    def watched(sequences: list[int], prompts: list[list[int]]) -> object:
        seen.append(len(prompts))
        return prefill(sequences, prompts)

    async def main() -> float | None:
        async with asyncio.timeout(20), Server(run) as server:
            alone = server.submit([1], 2)
            assert [len([token async for token in alone])] == [2]
            full = [server.submit([n], 2) for n in range(3)]
            for tokens in full:
                assert len([token async for token in tokens]) == 2
            assert max(tokens.request.ttft_s or 1 for tokens in full) < 0.1
            return alone.request.ttft_s

    run.scheduler.runner = type("Watched", (), {
        "prefill": staticmethod(watched), "decode": run.runner.decode, "cache": run.runner.cache,
        "decoder": run.runner.decoder,
    })()  # fmt: skip
    ttft_s = asyncio.run(main())
    assert ttft_s is not None
    assert ttft_s >= 0.1
    assert seen == [1, 3]


def test_wrong_prompts_and_servers_that_do_not_run() -> None:
    async def main() -> None:
        server = Server(engine())
        with pytest.raises(RuntimeError, match="the server is not running"):
            server.submit([1], 2)
        async with server:
            with pytest.raises(ValueError, match="prompt is empty"):
                server.submit([], 2)
            with pytest.raises(IndexError, match="prompt has the token 40"):
                server.submit([40], 2)
            with pytest.raises(ValueError, match="temperature is -1"):
                server.submit([1], 2, temperature=-1)
        with pytest.raises(RuntimeError, match="the server is not running"):
            server.submit([1], 2)

    asyncio.run(main())


def test_an_engine_that_fails_is_told_to_everybody() -> None:
    run = engine()

    def fail() -> None:
        raise ArithmeticError("broken")

    run.step = fail  # type: ignore[method-assign,assignment]

    async def main() -> None:
        async with asyncio.timeout(20), Server(run) as server:
            first, second = server.submit([1], 2), server.submit([2], 2)
            for tokens in (first, second):
                with pytest.raises(RuntimeError, match="the engine failed, and the server has ended"):
                    await anext(tokens)

    with pytest.raises(ArithmeticError, match="broken"):
        asyncio.run(main())
    assert run.scheduler.is_idle


def test_a_server_serves_once() -> None:
    async def main() -> None:
        run = engine()
        server = Server(run)
        async with asyncio.timeout(20):
            for _ in range(2):
                async with Server(run) as other:
                    assert len([token async for token in other.submit([1], 2)]) == 2
            async with server:
                pass
            with pytest.raises(RuntimeError, match="the server was entered before: it serves once, make another"):
                async with server:
                    pass

    asyncio.run(main())
