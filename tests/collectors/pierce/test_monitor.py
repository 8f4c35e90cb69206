from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from collectors.pierce.live import HOST, Redis, Wire, command, free_port, rows

from spikeprof.profiler.collectors.pierce.monitor import (
    TOTAL_KEY,
    MonitorCounts,
    MonitorOptions,
    Span,
    _OpenSpan,
    watch,
)
from spikeprof.profiler.errors import InputError

NIL = b"$-1\r\n"


def watched(
    port: int, steps: list[Callable[[], None]], options: MonitorOptions, counts: MonitorCounts
) -> list[Span | None]:
    """What is seen while the steps are taken, one per span."""

    async def main() -> list[Span | None]:
        seen: list[Span | None] = []
        spans = watch(HOST, port, options, counts)
        left = list(steps)
        async for span in spans:
            seen.append(span)
            if not left:
                break
            left.pop(0)()
        await spans.aclose()  # type: ignore[attr-defined]
        return seen

    return asyncio.run(asyncio.wait_for(main(), 20))


def test_spans_of_hits_only_and_misses_only_are_certain(redis: Redis) -> None:
    with Wire(redis.port) as wire:
        wire.ask(command("SET", 'a "b"\n\\\xff'.encode("latin1"), "1"), b"+OK\r\n")
        steps: list[Callable[[], None]] = [
            lambda: wire.ask(command("GET", "x1") + command("MGET", "x2", "x3"), NIL + b"*2\r\n" + NIL * 2),
            lambda: wire.ask(
                command("GET", 'a "b"\n\\\xff'.encode("latin1")) + command("PING"), b"$1\r\n1\r\n+PONG\r\n"
            ),
            lambda: wire.ask(command("SELECT", "2") + command("HGETALL", "x4"), b"+OK\r\n*0\r\n"),
            lambda: wire.ask(
                command("SELECT", "0") + command("GET"), b"+OK\r\n-ERR wrong number of arguments for 'get' command\r\n"
            ),
        ]
        counts = MonitorCounts()
        seen = watched(redis.port, steps, MonitorOptions(every_s=0.01), counts)
    found = [row for span in seen if span for row in rows(span.certain)]
    assert found == [
        *[("x1", False, "0"), ("x2", False, "0"), ("x3", False, "0")],
        *[('a "b"\n\\\\xff', True, "0"), ("x4", False, "2")],
    ]
    totals = [key_hit for span in seen if span for key_hit in rows(span.totals)]
    assert totals == [(TOTAL_KEY, False, "")] * 3 + [(TOTAL_KEY, True, ""), (TOTAL_KEY, False, "")]
    assert (counts.lookups, counts.unresolved_lookups, counts.broken_lines) == (5, 0, 0)


def test_what_is_mixed_is_not_guessed(redis: Redis) -> None:
    with Wire(redis.port) as wire:
        wire.ask(command("SET", "a", "1"), b"+OK\r\n")
        ask = command("MULTI") + command("GET", "a") + command("MGET", "x", "a", "y") + command("EXEC")
        got = b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n$1\r\n1\r\n*3\r\n" + NIL + b"$1\r\n1\r\n" + NIL
        counts = MonitorCounts()
        seen = watched(redis.port, [lambda: wire.ask(ask, got)], MonitorOptions(every_s=0.01), counts)
    (mixed,) = [span for span in seen if span and len(span.unresolved)]
    assert (mixed.unresolved.to_pylist(), len(mixed.certain)) == (["a", "x", "a", "y"], 0)
    assert (mixed.hits_count, mixed.misses_count, mixed.totals.hits.tolist()) == (2, 2, [True, False, True, False])
    assert counts.unresolved_lookups == 4


def test_a_password_is_needed_and_not_shown(tmp_path: Path) -> None:
    server = Redis(tmp_path, "--requirepass", "hush-hush")
    options = MonitorOptions(every_s=0.01, password="hush-hush")
    try:
        assert "hush" not in repr(options)
        assert watched(server.port, [], options, MonitorCounts())
        with pytest.raises(InputError, match=r"Redis refuses MONITOR \(NOAUTH Authentication required.\)") as refused:
            watched(server.port, [], MonitorOptions(), MonitorCounts())
        assert "hush" not in str(refused.value)
    finally:
        server.kill()


def test_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
    server = Redis(tmp_path)
    counts = MonitorCounts()
    steps = [server.kill, server.start, lambda: None]
    try:
        seen = watched(server.port, steps, MonitorOptions(every_s=0.01, retry_s=0.05), counts)
    finally:
        server.kill()
    assert None in seen
    assert seen[-1] is not None
    assert counts.reconnects >= 1


def test_no_server() -> None:
    port = free_port()
    with pytest.raises(InputError, match=f"the Redis at 127.0.0.1:{port} cannot be watched"):
        watched(port, [], MonitorOptions(), MonitorCounts())


def test_lines_that_are_none_and_more_look_ups_than_are_kept() -> None:
    counts = MonitorCounts()
    span = _OpenSpan(b"127.0.0.1:5", counts, most=2)
    span.line(b"+OK")
    span.line(b'+1.5 [0 lua] "get" "a"')
    span.line(b'+2.5 [0 127.0.0.1:9] "mget" "b" "\\x41\\"" "d"')
    span.line(b'+3.5 [0 127.0.0.1:9] "INFO" "stats"')  # another's
    span.line(b'+4.5 [0 127.0.0.1:5] "INFO" "stats"')
    assert span.close() == [(1.5, b"a", "0"), (2.5, b"b", "0")]
    assert (counts.broken_lines, counts.dropped_lookups) == (1, 2)
