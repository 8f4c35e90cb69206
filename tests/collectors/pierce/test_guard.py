from __future__ import annotations

import time
from itertools import pairwise

import pytest
from collectors.pierce.live import Redis, Wire, command, proxied
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spikeprof.profiler.collectors.pierce.conversation import WANTED
from spikeprof.profiler.collectors.pierce.resp import RequestParser
from spikeprof.profiler.collectors.pierce.writes import WORDS_MAX, WRITES, written

NIL = b"$-1\r\n"
LIMITED = b"-ERR spikeprof: look-ups of keys like this one are limited for now; try again later\r\n"


def guard(key: str) -> str:
    if key.startswith("broken"):
        raise ValueError(key)
    return "nil" if key.startswith("no") else "limit" if key.startswith("much") else "pass"


def commands_sent(redis: Redis, name: str) -> int:
    with Wire(redis.port) as wire:
        wire.send(command("INFO", "commandstats"))
        time.sleep(0.05)
        text = wire.socket.recv(1 << 20).decode()
    for line in text.splitlines():
        if line.startswith(f"cmdstat_{name}:calls="):
            return int(line.split("=")[1].split(",")[0])
    return 0


def test_what_does_not_exist_is_answered_without_the_upstream(redis: Redis) -> None:
    with proxied(redis.port, guard) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("SET", "a", "1") + command("CONFIG", "RESETSTAT"), b"+OK\r\n+OK\r\n")
        wire.ask(command("GET", "no1"), NIL)
        wire.ask(b"GET no2\r\n", NIL)
        wire.ask(command("EXISTS", "no1", "no2") + command("HGETALL", "no3"), b":0\r\n*0\r\n")
        wire.ask(command("MGET", "no1", "no2") + command("HMGET", "no3", "f", "g"), (b"*2\r\n" + NIL * 2) * 2)
        wire.ask(command("HGET", "no3", "f") + command("GETDEL", "no4") + command("GETEX", "no5"), NIL * 3)
        wire.ask(command("GET", "much1"), LIMITED)
        wire.ask(command("MGET", "no1", "a"), b"*2\r\n" + NIL + b"$1\r\n1\r\n")  # one of them passes
        wire.ask(command("GET", "a") + command("GET", "broken"), b"$1\r\n1\r\n" + NIL)
        wire.ask(command("GET", "no", "more"), b"-ERR wrong number of arguments for 'get' command\r\n")
        found = proxy.found()
    assert (commands_sent(redis, "get"), commands_sent(redis, "mget"), commands_sent(redis, "exists")) == (2, 1, 0)
    counts = proxy.proxy.counts
    assert (counts.nil_answers, counts.limit_answers, counts.guard_errors) == (9, 1, 1)
    misses = ["no1", "no2", "no1", "no2", "no3", "no1", "no2", "no3", "no3", "no4", "no5", "much1"]
    assert [(key, hit) for key, hit, _ in found] == [(key, False) for key in misses] + [
        *[("no1", False), ("a", True), ("a", True), ("broken", False)]
    ]


def test_order_is_kept_within_pipelines(redis: Redis) -> None:
    with proxied(redis.port, guard) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("SET", "a", "1"), b"+OK\r\n")
        asked = command("GET", "no1") + command("GET", "a") + command("GET", "no2") + command("GET", "no3")
        asked += command("INCR", "n") + command("GET", "much") + command("PING")
        wire.ask(asked, NIL + b"$1\r\n1\r\n" + NIL * 2 + b":1\r\n" + LIMITED + b"+PONG\r\n")
        # What waits for a blocking command waits behind it, whoever answers.
        wire.send(command("BLPOP", "list", "1") + command("GET", "no4"))
        wire.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            wire.read(1)
        wire.socket.settimeout(5)
        wire.ask(b"", b"*-1\r\n" + NIL)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_pipeline_in_any_pieces_has_its_replies_in_order(redis_port: int, data: st.DataObject) -> None:
    kinds = {
        command("GET", "no1"): NIL,
        command("GET", "a"): b"$1\r\n1\r\n",
        command("GET", "none"): NIL,
        command("SET", "b", "x" * 300): b"+OK\r\n",
        command("GET", "much"): LIMITED,
        b"PING\r\n": b"+PONG\r\n",
        b"EXISTS no1\r\n": b":0\r\n",
        command("MGET", "no1", "no2"): b"*2\r\n" + NIL * 2,
        command("MGET", "a", "no2"): b"*2\r\n$1\r\n1\r\n" + NIL,
        command("LRANGE", "l", "0", "-1"): b"*2\r\n$1\r\nx\r\n$1\r\ny\r\n",
        command("MULTI") + command("GET", "no1") + command("EXEC"): b"+OK\r\n+QUEUED\r\n*1\r\n" + NIL,
    }
    asked = data.draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=12))
    stream = b"".join(asked)
    cuts = data.draw(st.lists(st.integers(1, len(stream)), max_size=6))
    at = sorted({0, len(stream), *cuts})
    with Wire(redis_port) as wire:
        wire.ask(command("SET", "a", "1"), b"+OK\r\n")
        for begin, end in pairwise(at):
            wire.send(stream[begin:end])
            time.sleep(0.001)
        wire.ask(b"", b"".join(kinds[one] for one in asked))


@pytest.fixture
def redis_port(redis: Redis) -> object:
    with Wire(redis.port) as wire:
        wire.ask(command("RPUSH", "l", "x", "y"), b":2\r\n")
    with proxied(redis.port, guard) as proxy:
        yield proxy.port
    assert proxy.proxy.counts.malformed == 0


def test_the_protocol_that_is_spoken_decides_what_nil_is(redis: Redis) -> None:
    with proxied(redis.port, guard) as proxy, Wire(proxy.port) as wire:
        wire.send(command("HELLO", "3") + command("GET", "no1") + command("PING"))
        text = b""
        while not text.endswith(b"+PONG\r\n"):
            text += wire.read(1)
        assert text.endswith(b"*0\r\n_\r\n+PONG\r\n")
        wire.ask(command("HGETALL", "no") + command("MGET", "no", "no"), b"%0\r\n*2\r\n_\r\n_\r\n")
        wire.ask(command("RESET") + command("PING"), b"+RESET\r\n+PONG\r\n")
        wire.ask(command("GET", "no1"), NIL)


def test_the_guard_is_not_asked_inside_multi_or_where_replies_are_left_out(redis: Redis) -> None:
    with proxied(redis.port, guard) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("PING"), b"+PONG\r\n")
        wire.ask(command("MULTI") + command("GET", "no1") + command("EXEC"), b"+OK\r\n+QUEUED\r\n*1\r\n" + NIL)
        wire.ask(command("CLIENT", "REPLY", "SKIP") + command("GET", "no1") + command("PING"), b"+PONG\r\n")
        wire.ask(command("SUBSCRIBE", "c"), b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n")
        wire.send(command("GET", "no1"))
        assert wire.read(27) == b"-ERR Can't execute 'get': o"
    assert proxy.proxy.counts.nil_answers == 0


def test_the_guard_does_not_stand_in_for_a_password(redis: Redis) -> None:
    with Wire(redis.port) as admin:
        admin.ask(command("CONFIG", "SET", "requirepass", "hush-hush"), b"+OK\r\n")
        try:
            with proxied(redis.port, guard) as proxy, Wire(proxy.port) as wire:
                refused = b"-NOAUTH Authentication required.\r\n"
                wire.ask(command("GET", "no1"), refused)
                wire.ask(command("GET", "no1"), refused)
                wire.ask(command("AUTH", "hush-hush"), b"+OK\r\n")
                wire.ask(command("GET", "no1"), NIL)
                wire.ask(command("RESET") + command("PING"), b"+RESET\r\n" + refused)
                wire.ask(command("GET", "no1"), refused)
            assert proxy.proxy.counts.nil_answers == 1
        finally:
            admin.ask(command("CONFIG", "SET", "requirepass", ""), b"+OK\r\n")


def test_a_look_up_in_pieces_is_held_and_others_are_not(redis: Redis) -> None:
    with proxied(redis.port, guard) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("PING"), b"+PONG\r\n")
        for piece in (command("GET", "no1")[:9], command("GET", "no1")[9:20], command("GET", "no1")[20:]):
            wire.send(piece)
            time.sleep(0.02)
        assert wire.read(len(NIL)) == NIL
        value = b"v" * 200_000
        wire.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$200000\r\n" + value[:1000])
        time.sleep(0.02)
        wire.ask(value[1000:] + b"\r\n" + command("GET", "no2"), b"+OK\r\n" + NIL)
        wire.ask(command("GET", "n" * 100_000), NIL)  # too long to hold: passes
        wire.ask(command("GET", "no3") + b"*1\r\n:3\r\n", NIL)
        assert wire.rest() == b"-ERR Protocol error: expected '$', got ':'\r\n"
    assert proxy.proxy.counts.nil_answers == 3


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("SET a 1", ["a"]),
        ("setex a 10 1", ["a"]),
        ("PSETEX a 10 1", ["a"]),
        ("SETNX a 1", ["a"]),
        ("GETSET a 1", ["a"]),
        ("MSET a 1 b 2", ["a", "b"]),
        ("MSETNX a 1 b 2", ["a", "b"]),
        ("HSET a f 1", ["a"]),
        ("INCR a", ["a"]),
        ("LPUSH a 1 2", ["a"]),
        ("SADD a 1", ["a"]),
        ("ZADD a 1 x", ["a"]),
        ("XADD a * f 1", ["a"]),
        ("XGROUP CREATE a g $ MKSTREAM", ["a"]),
        ("RESTORE a 0 x", ["a"]),
        ("RENAME old a", ["a"]),
        ("COPY old a", ["a"]),
        ("BITOP AND a x y", ["a"]),
        ("ZUNIONSTORE a 2 x y", ["a"]),
        ("SORT x BY w LIMIT 0 5 store a", ["a"]),
        ("GEORADIUS x 1 2 3 m STOREDIST a", ["a"]),
        ("SORT x", []),
        ("GET a", []),
        ("DEL a", []),
        ("EVAL_RO x 0", []),
        ("EVAL x 1 a", None),
        ("FCALL f 1 a", None),
        ("DEBUG RELOAD", None),
        ("JSON.SET a $ 1", None),
        ("MSET " + "k v " * 40_000, None),
    ],
)
def test_keys_that_commands_write(words: str, keys: list[str] | None) -> None:
    args = RequestParser(WANTED | WRITES, WORDS_MAX).feed(command(*words.split()))[0][0]
    found = written((args[0] or b"").upper(), args)
    assert found == (keys if keys is None else [key.encode() for key in keys])
    assert len(b"".join(arg or b"" for arg in args[WORDS_MAX.get((args[0] or b"").upper(), len(args)) :])) == 0


def test_a_client_reads_its_own_write(redis: Redis) -> None:
    known: set[str] = set()
    told: list[list[str] | None] = []

    def wrote(keys: list[str] | None) -> None:
        told.append(keys)
        known.update(keys or ())

    with (
        proxied(redis.port, lambda key: "pass" if key in known else "nil", on_written=wrote) as proxy,
        Wire(proxy.port) as wire,
        Wire(proxy.port) as other,
    ):
        wire.ask(command("SET", "first", "1"), b"+OK\r\n")  # before it has shown that it is served
        assert told == [["first"]]
        wire.ask(
            command("GET", "new1") + command("SET", "new1", "x") + command("GET", "new1"), NIL + b"+OK\r\n$1\r\nx\r\n"
        )
        other.ask(command("PING") + command("GET", "new1"), b"+PONG\r\n$1\r\nx\r\n")
        for piece in (command("SET", "new2", "y")[:14], command("SET", "new2", "y")[14:]):
            other.send(piece)
            time.sleep(0.02)
        other.ask(command("GET", "new2"), b"+OK\r\n$1\r\ny\r\n")
        other.ask(command("MULTI") + command("INCR", "n") + command("EXEC"), b"+OK\r\n+QUEUED\r\n*1\r\n:1\r\n")
        other.ask(command("GET", "n"), b"$1\r\n1\r\n")
        assert proxy.proxy.counts.nil_answers == 1
        other.ask(command("EVAL", "return 7", "0"), b":7\r\n")
        assert told == [["first"], ["new1"], ["new2"], ["n"], None]


def test_who_is_not_served_adds_nothing_to_what_is_known(redis: Redis) -> None:
    told: list[list[str] | None] = []
    with Wire(redis.port) as admin:
        admin.ask(command("CONFIG", "SET", "requirepass", "hush-hush"), b"+OK\r\n")
        try:
            with proxied(redis.port, guard, on_written=told.append) as proxy:
                refused = b"-NOAUTH Authentication required.\r\n"
                with Wire(proxy.port) as wire:
                    wire.ask(command("SET", "a", "1") + command("EVAL", "x", "0"), refused * 2)
                with Wire(proxy.port) as wire:
                    asked = command("AUTH", "hush-hush") + command("SET", "no1", "1")
                    wire.ask(asked, b"+OK\r\n+OK\r\n")
                    assert told == [["no1"]]
        finally:
            admin.ask(command("CONFIG", "SET", "requirepass", ""), b"+OK\r\n")


@pytest.mark.parametrize("name", ["MGET", "MSET"])
def test_long_arguments_are_not_all_held(name: str) -> None:
    words = [name, *("x" * 16_000 for _ in range(2000))]
    (args, _), rest = RequestParser(WANTED | WRITES, WORDS_MAX).feed(command(*words) + command("GET", "a"))
    assert sum(len(arg or b"") for arg in args) < (4 << 20) + 20_000
    assert args[-2:] == [None, None]
    assert written(name.encode(), args) == (None if name == "MSET" else [])
    assert rest[0] == [b"GET", b"a"]
