from __future__ import annotations

import contextlib
import random
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from collectors.pierce.live import HOST, Redis, Wire, command, free_port, proxied

from spikeprof.profiler.collectors.pierce import conversation as conversation_module
from spikeprof.profiler.collectors.pierce.found import ProxyCounts
from spikeprof.profiler.collectors.pierce.proxy import Address, Proxy, ProxyOptions
from spikeprof.profiler.errors import UsageError

NIL = b"$-1\r\n"


def test_every_look_up_is_told_as_hit_or_miss(redis: Redis) -> None:
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("SET", "a", "1") + command("HSET", "h", "f", "1"), b"+OK\r\n:1\r\n")
        wire.ask(command("GET", "a"), b"$1\r\n1\r\n")
        wire.ask(command("GET", "x1"), NIL)
        wire.ask(command("MGET", "a", "x2", "a"), b"*3\r\n$1\r\n1\r\n" + NIL + b"$1\r\n1\r\n")
        wire.ask(command("getex", "a"), b"$1\r\n1\r\n")
        wire.ask(command("GETDEL", "x3"), NIL)
        wire.ask(command("HGET", "h", "f") + command("HGET", "h", "no"), b"$1\r\n1\r\n" + NIL)
        wire.ask(
            command("HMGET", "h", "no", "f") + command("HMGET", "x4", "f", "g"),
            b"*2\r\n" + NIL + b"$1\r\n1\r\n*2\r\n" + NIL * 2,
        )
        wire.ask(command("HGETALL", "h") + command("HGETALL", "x5"), b"*2\r\n$1\r\nf\r\n$1\r\n1\r\n*0\r\n")
        wire.ask(command("EXISTS", "a") + command("EXISTS", "x6", "x7"), b":1\r\n:0\r\n")
        wire.ask(command("EXISTS", "a", "x8"), b":1\r\n")  # which one? the reply does not say
        wire.ask(command("STRLEN", "x9") + b"GET x10\r\n", b":0\r\n" + NIL)
        wire.ask(command("GET", "h"), b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n")
        found = proxy.found()
    assert [(key, hit) for key, hit, _ in found] == [
        *[("a", True), ("x1", False), ("a", True), ("x2", False), ("a", True), ("a", True), ("x3", False)],
        *[("h", True), ("h", False), ("h", True), ("x4", False), ("h", True), ("x5", False)],
        *[("a", True), ("x6", False), ("x7", False), ("x10", False)],
    ]
    counts = proxy.proxy.counts
    assert (counts.lookups, counts.unclear_lookups, counts.failed_lookups) == (17, 2, 1)
    assert (counts.connections, counts.open_connections, counts.unread_bytes) == (1, 0, 0)
    now = time.time()
    assert all(now - 60 < ts <= now for batch in proxy.batches for ts in batch.ts_s)
    assert all(np.isnan(batch.ttls_s).all() for batch in proxy.batches)  # not known


def test_hashes_field_by_field(redis: Redis) -> None:
    with proxied(redis.port, options=ProxyOptions(hash_fields=True)) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("HSET", "h", "f", "1"), b":1\r\n")
        wire.ask(command("HGET", "h", "no") + command("HMGET", "h", "f", "g"), NIL + b"*2\r\n$1\r\n1\r\n" + NIL)
        assert proxy.found() == [("h/no", False, ""), ("h/f", True, ""), ("h/g", False, "")]


def test_resp3_with_its_nulls_maps_and_pushes(redis: Redis) -> None:
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire, Wire(redis.port) as other:
        wire.send(command("HELLO", "3"))
        assert wire.read(4) == b"%7\r\n"
        wire.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            wire.read(1 << 20)
        wire.socket.settimeout(5)
        wire.ask(command("CLIENT", "TRACKING", "ON"), b"+OK\r\n")
        wire.ask(command("GET", "k"), b"_\r\n")
        other.ask(command("SET", "k", "v"), b"+OK\r\n")
        push = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n"
        assert wire.read(len(push)) == push
        wire.ask(command("GET", "k") + command("HGETALL", "none"), b"$1\r\nv\r\n%0\r\n")
        subscribed = b">3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n"
        wire.ask(command("SUBSCRIBE", "c") + command("GET", "none"), subscribed + b"_\r\n")
        other.ask(command("PUBLISH", "c", "hello"), b":1\r\n")
        message = b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$5\r\nhello\r\n"
        assert wire.read(len(message)) == message
        wire.ask(command("GET", "k"), b"$1\r\nv\r\n")
        found = [(key, hit) for key, hit, _ in proxy.found()]
    assert found == [("k", False), ("k", True), ("none", False), ("none", False), ("k", True)]


def test_subscriptions_of_resp2_answer_once_per_channel(redis: Redis) -> None:
    def told(kind: str, channel: str, count: int) -> bytes:
        return b"*3\r\n$%d\r\n%b\r\n$1\r\n%b\r\n:%d\r\n" % (len(kind), kind.encode(), channel.encode(), count)

    with proxied(redis.port) as proxy, Wire(proxy.port) as wire, Wire(redis.port) as other:
        all_told = told("subscribe", "a", 1) + told("subscribe", "b", 2) + told("subscribe", "a", 2)
        wire.ask(command("SUBSCRIBE", "a", "b", "a"), all_told)
        wire.ask(command("PSUBSCRIBE", "m"), told("psubscribe", "m", 3))
        other.ask(command("PUBLISH", "a", "GET"), b":1\r\n")
        message = b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n$3\r\nGET\r\n"
        assert wire.read(len(message)) == message
        wire.ask(command("PING"), b"*2\r\n$4\r\npong\r\n$0\r\n\r\n")
        wire.send(command("UNSUBSCRIBE") + command("PUNSUBSCRIBE"))
        left = [wire.read(len(told("unsubscribe", "a", 1))) for _ in range(2)]  # in any order
        assert [one[-4:] for one in left] == [b":2\r\n", b":1\r\n"]
        wire.ask(b"", told("punsubscribe", "m", 0))
        none = b"*3\r\n$11\r\nunsubscribe\r\n$-1\r\n:0\r\n"
        wire.ask(command("UNSUBSCRIBE") + command("GET", "x"), none + NIL)
        values = b"*3\r\n" + NIL * 3
        wire.ask(command("MGET", "p", "q", "r"), values)
        found = [key for key, _, _ in proxy.found()]
    assert found == ["x", "p", "q", "r"]


def test_transactions_are_matched_inside_exec(redis: Redis) -> None:
    queued = b"+QUEUED\r\n"
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("MULTI"), b"+OK\r\n")
        wire.ask(command("SET", "a", "1") + command("GET", "a") + command("GET", "x1"), queued * 3)
        wire.ask(command("GET"), b"-ERR wrong number of arguments for 'get' command\r\n")
        wire.ask(command("EXEC"), b"-EXECABORT Transaction discarded because of previous errors.\r\n")
        everything = [("SET", "a", "1"), ("GET", "a"), ("MGET", "x2", "a"), ("EXISTS", "x3"), ("HGETALL", "x4")]
        data = command("MULTI") + b"".join(command(*words) for words in everything) + command("EXEC")
        values = b"*5\r\n+OK\r\n$1\r\n1\r\n*2\r\n" + NIL + b"$1\r\n1\r\n:0\r\n*0\r\n"
        wire.ask(data, b"+OK\r\n" + queued * 5 + values)
        wire.ask(command("MULTI") + command("GET", "x5") + command("DISCARD"), b"+OK\r\n+QUEUED\r\n+OK\r\n")
        wire.ask(command("WATCH", "a") + command("SET", "a", "2"), b"+OK\r\n+OK\r\n")
        wire.ask(command("MULTI") + command("GET", "x6") + command("EXEC"), b"+OK\r\n+QUEUED\r\n*-1\r\n")
        wire.ask(command("GET", "x7"), NIL)
        found = [(key, hit) for key, hit, _ in proxy.found()]
    assert found == [("a", True), ("x2", False), ("a", True), ("x3", False), ("x4", False), ("x7", False)]


def test_replies_that_are_left_out(redis: Redis) -> None:
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("CLIENT", "REPLY", "SKIP") + command("GET", "s1") + command("GET", "x1"), NIL)
        wire.send(command("CLIENT", "REPLY", "OFF") + command("GET", "s2") + command("MGET", "s3", "s4"))
        wire.ask(command("CLIENT", "REPLY", "ON") + command("GET", "x2"), b"+OK\r\n" + NIL)
        wire.ask(command("CLIENT", "GETNAME") + command("GET", "x3"), NIL * 2)
        assert [key for key, _, _ in proxy.found()] == ["x1", "x2", "x3"]
    assert proxy.proxy.counts.unanswered_lookups == 4


def test_monitor_reset_and_quit(redis: Redis) -> None:
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire, Wire(redis.port) as other:
        wire.ask(command("MONITOR"), b"+OK\r\n")
        other.ask(command("GET", "y"), NIL)
        assert wire.read(1) == b"+"
        while wire.read(1) != b"\n":
            pass
        wire.ask(command("RESET") + command("GET", "x"), b"+RESET\r\n" + NIL)
        wire.send(command("QUIT"))
        assert wire.rest() == b"+OK\r\n"
        assert [key for key, _, _ in proxy.found()] == ["x"]
    assert proxy.proxy.counts.refused == 0


def test_scripts_and_blocking_commands_pass(redis: Redis) -> None:
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire, Wire(redis.port) as other:
        wire.ask(
            command("EVAL", "return {1,{2,'x'},redis.call('GET','none')}", "0"),
            b"*3\r\n:1\r\n*2\r\n:2\r\n$1\r\nx\r\n" + NIL,
        )
        wire.send(command("BLPOP", "list", "0") + command("GET", "x"))
        time.sleep(0.1)
        other.ask(command("RPUSH", "list", "v"), b":1\r\n")
        wire.ask(b"", b"*2\r\n$4\r\nlist\r\n$1\r\nv\r\n" + NIL)
        assert proxy.found() == [("x", False, "")]


def test_tenants_are_users_or_databases(redis: Redis) -> None:
    with Wire(redis.port) as wire:
        wire.ask(command("ACL", "SETUSER", "team", "on", ">hush-hush", "~*", "+@all"), b"+OK\r\n")
    with proxied(redis.port, options=ProxyOptions(tenant_of="user")) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("GET", "a"), NIL)
        wire.ask(
            command("AUTH", "team", "wrong"), b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        )
        wire.ask(
            command("GET", "b") + command("AUTH", "team", "hush-hush") + command("GET", "c"), NIL + b"+OK\r\n" + NIL
        )
        wire.ask(command("RESET") + command("GET", "d"), b"+RESET\r\n" + NIL)
        wire.send(command("HELLO", "3", "AUTH", "team", "hush-hush") + command("GET", "e"))
        time.sleep(0.2)
        assert [(key, tenant) for key, _, tenant in proxy.found()] == [
            *[("a", "default"), ("b", "default"), ("c", "team"), ("d", "default"), ("e", "team")]
        ]
    with proxied(redis.port, options=ProxyOptions(tenant_of="db")) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("GET", "a") + command("SELECT", "3") + command("GET", "b"), NIL + b"+OK\r\n" + NIL)
        wire.ask(command("SELECT", "99") + command("GET", "c"), b"-ERR DB index is out of range\r\n" + NIL)
        assert proxy.found() == [("a", False, "0"), ("b", False, "3"), ("c", False, "3")]


def test_how_long_entries_live_is_asked_where_wanted(tmp_path: Path) -> None:
    server = Redis(tmp_path, "--requirepass", "hush-hush")
    options = ProxyOptions(ttl_keys_max=3, ttl_password="hush-hush")
    assert "hush" not in repr(options)
    with proxied(server.port, options=options) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("AUTH", "hush-hush") + command("SET", "a", "1", "EX", "100"), b"+OK\r\n+OK\r\n")
        wire.ask(command("SET", "b", "1") + command("SELECT", "1") + command("SET", "a", "1"), b"+OK\r\n" * 3)
        one = b"$1\r\n1\r\n"
        wire.ask(
            command("GET", "a") + command("SELECT", "0") + command("MGET", "a", "b", "x"),
            one + b"+OK\r\n*3\r\n" + one * 2 + NIL,
        )
        found = proxy.found()
        left_s = [ttl for batch in proxy.batches for ttl in batch.ttls_s.tolist()]
    server.kill()
    assert [key for key, _, _ in found] == ["a", "a", "b", "x"]
    assert 90 < left_s[1] <= 100
    assert np.isnan([left_s[0], *left_s[2:]]).all()  # another database, without end, not there
    assert proxy.proxy.counts.ttl_failures == 0
    with proxied(free_port(), options=ProxyOptions(ttl_keys_max=1)) as proxy:
        proxy.call(lambda: proxy.proxy.found.run("", 1.0, "0"))
        proxy.call(lambda: proxy.proxy.found.keys.append(b"k"))
        proxy.call(lambda: proxy.proxy.found.hits.append(True))
        assert proxy.found() == [("k", True, "")]
    assert proxy.proxy.counts.ttl_failures == 1


def test_passwords_are_not_kept() -> None:
    counts = ProxyCounts()
    conversation = conversation_module.Conversation(counts)
    conversation.commands([([b"AUTH", b"team", b"hush-hush"], 0), ([b"HELLO", b"3", b"AUTH", b"me", b"hush-hush"], 0)])
    kept = [waiting.args for waiting in conversation.pending if isinstance(waiting, conversation_module._Waiting)]
    assert kept == [[b"AUTH", b"team"], [b"HELLO", b"me"]]


def test_keys_that_are_no_text_and_keys_with_line_ends(redis: Redis) -> None:
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire:
        wire.ask(
            command("GET", b"\xff\x00") + command("GET", "a\r\nb") + command("SET", "v", "x\r\n"), NIL * 2 + b"+OK\r\n"
        )
        wire.ask(command("GET", "v") + command("GET", "x" * 20_000), b"$3\r\nx\r\n\r\n" + NIL)
        assert [key for key, _, _ in proxy.found()] == ["\\xff\x00", "a\r\nb", "v"]
    assert proxy.proxy.counts.unclear_lookups == 1


def test_a_deep_pipeline_and_a_slow_reader(redis: Redis) -> None:
    value = b"v" * 100_000
    with proxied(redis.port) as proxy, Wire(proxy.port, timeout=30) as wire:
        wire.ask(command("SET", "big", value), b"+OK\r\n")
        asked = command("GET", "big") * 500 + command("GET", "x") * 20_000
        sender = threading.Thread(target=wire.send, args=(asked,))
        sender.start()
        time.sleep(0.3)  # 50 MB wait: neither side may be held in memory
        reply = b"$100000\r\n" + value + b"\r\n"
        for _ in range(500):
            assert wire.read(len(reply)) == reply
        assert wire.read(20_000 * len(NIL)) == NIL * 20_000
        sender.join()
        found = proxy.found()
    assert (sum(hit for _, hit, _ in found), len(found)) == (500, 20_500)


def test_a_huge_value_streams_through(redis: Redis) -> None:
    size = 64 << 20
    with proxied(redis.port) as proxy, Wire(proxy.port, timeout=30) as wire:
        wire.send(b"*3\r\n$3\r\nSET\r\n$4\r\nhuge\r\n$%d\r\n" % size)
        for _ in range(64):
            wire.send(b"x" * (1 << 20))
        wire.ask(b"\r\n", b"+OK\r\n")
        wire.send(command("GET", "huge") + command("GET", "x"))
        left = len(b"$67108864\r\n") + size + 2
        while left:
            left -= len(wire.socket.recv(min(left, 1 << 20)))
        assert wire.read(len(NIL)) == NIL
        assert proxy.found() == [("huge", True, ""), ("x", False, "")]


def test_malformed_commands_end_one_connection(redis: Redis) -> None:
    with proxied(redis.port) as proxy, Wire(proxy.port) as good, Wire(proxy.port) as bad:
        good.ask(command("GET", "a"), NIL)
        bad.send(command("GET", "b") + b"*1\r\n:3\r\n")
        assert bad.rest() == NIL + b"-ERR Protocol error: expected '$', got ':'\r\n"
        good.ask(command("GET", "c"), NIL)
        assert sorted(key for key, _, _ in proxy.found()) == ["a", "b", "c"]
    assert proxy.proxy.counts.malformed == 1


@pytest.mark.parametrize("guard", [None, lambda _: "nil"], ids=["plain", "guarded"])
def test_clients_that_send_anything_harm_nobody_else(redis: Redis, guard: Callable[[str], str] | None) -> None:
    chance = random.Random(11)
    parts = [b"*", b"$", b"\r\n", b"3", b"-1", b"GET", b" ", b"MULTI\r\n", b"EXEC\r\n", b"x" * 70_000, b"\xff\x00"]
    parts += [command("GET", "k"), command("SUBSCRIBE", "c"), command("RESET"), command("CLIENT", "REPLY", "OFF")]
    parts += [command("HELLO", "3"), command("UNSUBSCRIBE"), command("MONITOR"), b"*2\r\n$3\r\nGET\r\n$9\r\n"]
    with proxied(redis.port, guard) as proxy, Wire(proxy.port) as good:
        for _ in range(60):
            with Wire(proxy.port) as wild, contextlib.suppress(OSError):
                for _ in range(chance.randrange(1, 6)):
                    wild.send(b"".join(chance.choices(parts, k=chance.randrange(1, 6))))
                    good.ask(command("PING"), b"+PONG\r\n")
        good.ask(command("SET", "k", "v"), b"+OK\r\n")
        proxy.close()
    counts = proxy.proxy.counts
    assert (counts.analysis_errors, counts.open_connections, counts.connections) == (0, 0, 61)
    assert counts.malformed > 0


def test_an_upstream_that_is_no_redis() -> None:
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(100)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                peer.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        with proxied(server.getsockname()[1]) as proxy, Wire(proxy.port) as wire:
            wire.send(command("GET", "a"))
            assert b"-ERR spikeprof: the upstream 127.0.0.1:" in wire.rest()
            thread.join()
            assert proxy.found() == []
        assert proxy.proxy.counts.malformed == 1


def test_an_upstream_that_is_down_killed_and_back(tmp_path: Path) -> None:
    server = Redis(tmp_path)
    with proxied(server.port) as proxy:
        idle = Wire(proxy.port)
        busy = Wire(proxy.port)
        busy.ask(command("GET", "a"), NIL)
        busy.send(command("BLPOP", "list", "0"))
        idle.ask(command("PING"), b"+PONG\r\n")
        time.sleep(0.1)
        server.kill()
        assert b"-ERR spikeprof: the upstream" in busy.rest()
        assert idle.rest() == b""
        with Wire(proxy.port) as wire:
            wire.send(command("GET", "b"))
            refused = wire.rest().decode()
            assert refused.startswith(f"-ERR spikeprof: cannot reach the upstream 127.0.0.1:{server.port} (")
            assert refused.endswith("connect again when it is back\r\n")
        early = Wire(proxy.port)
        time.sleep(0.1)
        server.start()
        early.ask(command("GET", "c"), NIL)  # it had come while there was none
        for wire in (early, busy, idle):
            wire.socket.close()
        server.kill()
        assert [key for key, _, _ in proxy.found()] == ["a", "c"]
    assert proxy.proxy.counts.refused == 2


def test_an_upstream_that_does_not_accept() -> None:
    with socket.create_server((HOST, 0), backlog=0) as server:
        fill = [socket.socket() for _ in range(4)]
        for one in fill:
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        options = ProxyOptions(connect_timeout_s=0.2)
        with proxied(server.getsockname()[1], options=options) as proxy, Wire(proxy.port) as wire:
            wire.send(command("GET", "a"))
            assert b"no connection within 0.2 s" in wire.rest()
        for one in fill:
            one.close()


@pytest.mark.parametrize("guard", [None, lambda _: "pass"], ids=["plain", "guarded"])
def test_an_upstream_that_stalls(tmp_path: Path, guard: Callable[[str], str] | None) -> None:
    server = Redis(tmp_path)
    options = ProxyOptions(reply_timeout_s=0.3)
    with proxied(server.port, guard, options) as proxy, Wire(proxy.port) as wire, Wire(proxy.port) as blocked:
        wire.ask(command("GET", "a"), NIL)
        blocked.ask(command("BLPOP", "list", "0.6"), b"*-1\r\n")  # takes its time by right
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        wire.send(command("GET", "b"))
        began = time.monotonic()
        assert b"-ERR spikeprof: no reply from the upstream" in wire.rest()
        assert 0.25 < time.monotonic() - began < 3
        server.process.send_signal(signal.SIGCONT)
        blocked.ask(command("GET", "c"), NIL)
    server.kill()


def test_a_fault_of_the_analysis_costs_no_traffic(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(conversation_module.Conversation, "commands", fail)
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("SET", "a", "1"), b"+OK\r\n")
        time.sleep(0.1)
        wire.ask(command("SET", "a", "1") + command("GET", "a"), b"+OK\r\n$1\r\n1\r\n")
        assert proxy.found() == []
    counts = proxy.proxy.counts
    assert counts.analysis_errors >= 1
    assert counts.unread_bytes > 0


def test_a_slow_receiver_costs_look_ups_not_traffic(redis: Redis) -> None:
    options = ProxyOptions(held_lookups_max=100, batch_s=0.01)
    with proxied(redis.port, options=options) as proxy, Wire(proxy.port) as wire:
        proxy.slow_s = 0.5
        wire.ask(command("GET", "first"), NIL)
        time.sleep(0.1)
        wire.ask(command("GET", "x") * 1000, NIL * 1000)
        found = proxy.found()
    counts = proxy.proxy.counts
    assert len(found) == counts.lookups == 101
    assert counts.dropped_lookups == 900


def test_a_receiver_that_fails_is_counted(redis: Redis) -> None:
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire:
        proxy.batches = None  # type: ignore[assignment]
        wire.ask(command("GET", "x"), NIL)
        time.sleep(0.2)
        wire.ask(command("GET", "x"), NIL)
        proxy.close()
    assert proxy.proxy.counts.receiver_errors == 2


def test_analysis_that_is_behind_gives_connections_up_until_they_are_quiet(redis: Redis) -> None:
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("GET", "a"), NIL)
        time.sleep(0.1)
        (client,) = proxy.proxy._clients
        proxy.call(client.give_up)
        time.sleep(0.05)
        wire.ask(command("GET", "b"), NIL)  # no pause has been seen yet
        time.sleep(0.1)
        wire.ask(command("GET", "c"), NIL)
        wire.ask(command("GET", "d"), NIL)
        assert [key for key, _, _ in proxy.found()] == ["a", "c", "d"]
    counts = proxy.proxy.counts
    assert (counts.unfollowed, counts.unread_bytes) == (1, len(command("GET", "b")) + len(NIL))


def test_too_much_to_read_is_found_and_traffic_goes_on(redis: Redis) -> None:
    options = ProxyOptions(unread_bytes_max=1000, analysis_share_max=0.01)
    with proxied(redis.port, options=options) as proxy, Wire(proxy.port) as wire:
        until, done = time.monotonic() + 8, 0
        while time.monotonic() < until and not proxy.proxy.counts.unfollowed:
            wire.ask(command("INCR", "n") * 5000, b"".join(b":%d\r\n" % (done + n) for n in range(1, 5001)))
            done += 5000
        proxy.close()
    counts = proxy.proxy.counts
    assert counts.unfollowed >= 1
    assert counts.unread_bytes > 1000


def test_an_address_that_is_taken(redis: Redis) -> None:
    import asyncio

    async def nothing(_: object) -> None: ...

    proxy = Proxy(Address(HOST, redis.port), Address(HOST, 1), nothing)
    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{redis.port}: "):
        asyncio.run(proxy.start())


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    try:
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=upstream"),
                *("-addext", "subjectAltName=DNS:upstream", "-keyout", "key.pem", "-out", "cert.pem"),
            ],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no openssl command to make a certificate with")
    return tmp_path


def test_tls_to_the_upstream(certificate: Path) -> None:
    port = free_port()
    files = ["--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-ca-cert-file", "cert.pem"]
    try:
        server = Redis(certificate, "--tls-port", str(port), *files, "--tls-auth-clients", "no")
    except TimeoutError:
        pytest.skip("this redis-server was built without TLS")
    trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    options = ProxyOptions(upstream_tls=trusting, upstream_name="upstream")
    with proxied(port, options=options) as proxy, Wire(proxy.port) as wire:
        wire.ask(command("SET", "a", "1") + command("GET", "a"), b"+OK\r\n$1\r\n1\r\n")
        assert proxy.found() == [("a", True, "")]
    # A certificate that is not the upstream's is refused.
    with proxied(port, options=ProxyOptions(upstream_tls=trusting)) as proxy, Wire(proxy.port) as wire:
        wire.send(command("GET", "a"))
        assert b"-ERR spikeprof: cannot reach the upstream" in wire.rest()
    server.kill()


def test_a_client_that_ends_its_side_still_gets_replies(redis: Redis) -> None:
    with proxied(redis.port) as proxy, Wire(proxy.port) as wire:
        wire.send(command("GET", "a"))
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.rest() == NIL
        assert proxy.found() == [("a", False, "")]


def test_replication_passes_and_is_not_followed(redis: Redis, tmp_path: Path) -> None:
    with proxied(redis.port) as proxy:
        replica = Redis(tmp_path, "--replicaof", HOST, str(proxy.port))
        with Wire(redis.port) as wire, Wire(replica.port) as reader:
            wire.ask(command("SET", "k", "v"), b"+OK\r\n")
            lines = reader.socket.makefile("rb")
            until = time.monotonic() + 10
            answer = b""
            while time.monotonic() < until and answer != b"$1\r\n":
                time.sleep(0.05)
                reader.send(command("GET", "k"))
                answer = lines.readline()
            assert lines.readline() == b"v\r\n"
        replica.kill()
        assert proxy.found() == []
    assert proxy.proxy.counts.malformed == 0
