"""An asyncio front of the engine: many tasks submit prompts, each gets its own stream of tokens.

The engine's steps run in one worker thread, so that the event loop stays free; requests and cancellations are applied
between steps. Waiting requests are admitted together once ``max_size`` of them wait or the oldest has waited
``max_delay_s`` (the engine's options), and join what is running; see scheduler.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from spikeprof.kernels.engine.engine import Engine
from spikeprof.kernels.engine.sampling import Sampling
from spikeprof.kernels.engine.scheduler import Request


class Tokens:
    """The tokens of one request as they come: an async iterator. Leaving it early cancels the request.

    That is: by ``aclose``, by leaving ``async with``, when the task that waits for a token is cancelled, or when
    nothing refers to the iterator any more. ``request`` has the times, and why it ended.
    """

    def __init__(self, server: Server, request: Request, changed: asyncio.Event) -> None:
        self.request = request
        self._server, self._changed = server, changed
        self._sent_count = 0

    def __aiter__(self) -> Tokens:
        return self

    async def __anext__(self) -> int:
        while self._sent_count == len(self.request.tokens):
            if self._server.failure is not None:
                raise RuntimeError("the engine failed, and the server has ended") from self._server.failure
            if self.request.is_done:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await self._changed.wait()
            except asyncio.CancelledError:
                self._server.cancel(self.request)
                raise
        self._sent_count += 1
        return self.request.tokens[self._sent_count - 1]

    async def aclose(self) -> None:
        """Cancel what is left. Safe to repeat."""
        self._server.cancel(self.request)

    async def __aenter__(self) -> Tokens:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.cancel(self.request)

    def __del__(self) -> None:
        self._server.cancel(self.request)


class Server:
    """Serves one engine, which nobody else may use meanwhile; once. Leaving it cancels what is still open.

    async with Server(engine) as server:
        async for token in server.submit([1, 2, 3], max_new_tokens=16):
            ...

    ``failure`` is what ended it, if the engine raised: then the iterators raise RuntimeError, and leaving raises it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._changed: dict[int, asyncio.Event] = {}  # of open requests; wakes their iterators, but keeps none alive
        self._new: list[Request] = []
        self._cancelled: deque[Request] = deque()  # iterators are collected, and append to it, in any thread
        self._wake = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop_token: int | None = None,
        seed: int = 0,
    ) -> Tokens:
        """Queue a prompt of token ids; call it from the event loop's thread.

        Raises ValueError and IndexError as ``Engine.generate``, RuntimeError when the server is not running.
        """
        if self._task is None or self._task.done() or self._is_closing:
            raise RuntimeError("the server is not running: submit inside 'async with Server(engine)'")
        request = self.engine.scheduler.make_request(
            prompt, max_new_tokens, Sampling(temperature, top_p, seed), stop_token
        )
        changed = asyncio.Event()
        self._changed[request.id] = changed
        self._new.append(request)
        self._wake.set()
        return Tokens(self, request, changed)

    def cancel(self, request: Request) -> None:
        """End a request before the next step; its pages go back. Nothing happens where it is done already."""
        if not request.is_done and self._loop is not None and not self._loop.is_closed():
            self._cancelled.append(request)
            self._loop.call_soon_threadsafe(self._wake.set)

    async def __aenter__(self) -> Server:
        if self._task is not None:
            raise RuntimeError("the server was entered before: it serves once, make another")
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._serve(), name="engine server")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        if kind is None and self.failure is not None:
            raise self.failure

    async def _serve(self) -> None:
        scheduler = self.engine.scheduler
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="engine") as worker:
                while not self._is_closing:
                    self._apply()
                    due_s = scheduler.due_in_s()
                    if due_s > 0:
                        await self._sleep(due_s)
                        continue
                    served = await asyncio.get_running_loop().run_in_executor(worker, self.engine.step)
                    self._tell(served)
        except Exception as error:
            self.failure = error
        finally:
            self._new, left = [], self._new
            for request in [*left, *scheduler.waiting, *scheduler.running]:
                scheduler.cancel(request)
                self._tell([request])

    def _apply(self) -> None:
        """Pass on what tasks asked for since the last step."""
        self._new, new = [], self._new
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        for request in new:
            self.engine.scheduler.add(request)
        for request in cancelled:
            self.engine.scheduler.cancel(request)
        self._tell(cancelled)

    async def _sleep(self, most_s: float) -> None:
        """Until somebody asks for something, but no longer than this."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), None if math.isinf(most_s) else most_s)

    def _tell(self, requests: Sequence[Request]) -> None:
        for request in requests:
            changed = self._changed.get(request.id)
            if changed is not None:
                changed.set()
            if request.is_done:
                self._changed.pop(request.id, None)
