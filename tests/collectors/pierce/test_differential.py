"""Redis's own command set, once to a server directly and once through the proxy to a second one: the same bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from collectors.pierce.live import Redis, Wire, command, proxied

from spikeprof.profiler.collectors.pierce.found import ProxyCounts

#: What cannot be compared: differs by time, chance, process or connection, or ends it, or waits.
_LEFT_OUT = (
    "TIME INFO RANDOMKEY CLIENT LASTSAVE DEBUG MEMORY LATENCY SLOWLOG ROLE CONFIG ACL SHUTDOWN REPLICAOF SLAVEOF "
    "FAILOVER MONITOR SYNC PSYNC SUBSCRIBE PSUBSCRIBE SSUBSCRIBE SAVE BGSAVE BGREWRITEAOF HELLO RESET QUIT COMMAND "
    "REPLCONF WAIT CLUSTER LOLWUT MODULE KEYS SCAN MULTI EXEC UNSUBSCRIBE PUNSUBSCRIBE SUNSUBSCRIBE"
)
_WORDS = (
    "SET s v|GET s|GETSET s w|SETEX t 100 v|TTL t|PSETEX t 100000 v|SETNX s x|SETNX n 1|MSET a 1 b 2|MSETNX a 1 c 3|"
    "MGET a b none|APPEND s tail|STRLEN s|GETRANGE s 0 1|SUBSTR s 0 1|SETRANGE s 2 xx|INCR n|INCRBY n 5|DECR n|"
    "DECRBY n 3|INCRBYFLOAT n 1.5|GETEX s PERSIST|GETDEL s|GETDEL s|LCS a b|SETBIT bits 7 1|GETBIT bits 7|"
    "BITCOUNT bits|BITPOS bits 1|BITOP NOT nots bits|BITFIELD bits INCRBY i5 100 1 GET u4 0|BITFIELD_RO bits GET u4 0|"
    "EXISTS a b none|DEL b|UNLINK c|TYPE a|RENAME a d|RENAMENX d e|COPY e f|TOUCH e f|OBJECT ENCODING e|OBJECT HELP|"
    "DUMP e|RESTORE g 0 bad|EXPIRE e 100|EXPIRETIME none|PEXPIRE e 100000|PERSIST e|PTTL e|EXPIREAT e 99999999999|"
    "MOVE f 1|SELECT 1|GET f|SWAPDB 0 1|DBSIZE|SELECT 0|FLUSHDB|SELECT 1|DBSIZE|SELECT 0|"
    "LPUSH l a b c|RPUSH l d e|LPUSHX none x|RPUSHX l f|LRANGE l 0 -1|LINDEX l 1|LINSERT l BEFORE c x|LLEN l|LPOP l|"
    "RPOP l 2|LREM l 0 a|LSET l 0 y|LTRIM l 0 5|LPOS l d|RPOPLPUSH l l2|LMOVE l l2 LEFT RIGHT|LMPOP 1 l LEFT|"
    "BLPOP l2 1|BRPOP l2 1|RPUSH l3 a b|BRPOPLPUSH l3 l4 1|BLMOVE l3 l4 LEFT LEFT 1|BLMPOP 1 1 l4 LEFT|LRANGE l4 0 -1|"
    "HSET h f v g w|HGET h f|HGET h none|HMGET h f none g|HGETALL h|HGETALL none|HMSET h i 1|HINCRBY h i 4|"
    "HINCRBYFLOAT h i 0.5|HKEYS h|HVALS h|HLEN h|HEXISTS h f|HSTRLEN h f|HSETNX h f x|HDEL h g|HSCAN h 0|"
    "SADD ints 1 2 3|SMEMBERS ints|SISMEMBER ints 2|SMISMEMBER ints 1 9|SCARD ints|SADD ints2 2 3|SINTER ints ints2|"
    "SINTERCARD 2 ints ints2|SUNION ints ints2|SDIFF ints ints2|SINTERSTORE o ints ints2|SUNIONSTORE o ints ints2|"
    "SDIFFSTORE o ints ints2|SMOVE ints ints2 1|SREM ints 3|SSCAN ints 0|SRANDMEMBER ints|SPOP ints|"
    "ZADD z 1 a 2 b 3.5 c|ZADD z NX GT 1 a|ZADD z XX CH 4 a|ZRANGE z 0 -1 WITHSCORES|ZREVRANGE z 0 -1|ZSCORE z b|"
    "ZSCORE z none|ZMSCORE z a none|ZINCRBY z 1 b|ZRANK z b|ZREVRANK z b|ZCARD z|ZCOUNT z 1 3|ZLEXCOUNT z - +|"
    "ZRANGEBYSCORE z 1 9 WITHSCORES|ZREVRANGEBYSCORE z 9 1|ZRANGEBYLEX z - +|ZREVRANGEBYLEX z + -|"
    "ZRANGESTORE z2 z 0 1|ZUNION 2 z z2 WITHSCORES|ZINTER 2 z z2|ZDIFF 2 z z2|ZINTERCARD 2 z z2|ZUNIONSTORE z3 2 z z2|"
    "ZINTERSTORE z3 2 z z2|ZDIFFSTORE z3 2 z z2|ZSCAN z 0|ZPOPMIN z|ZPOPMAX z|ZMPOP 1 z2 MIN|BZPOPMIN z 1|"
    "ZADD z 1 a 2 b|BZPOPMAX z 1|BZMPOP 1 1 z MIN|ZREM z a|ZREMRANGEBYRANK z3 0 0|ZREMRANGEBYSCORE z3 0 1|"
    "ZREMRANGEBYLEX z3 - +|ZRANDMEMBER none|"
    "GEOADD geo 13.361389 38.115556 P 15.087269 37.502669 C|GEODIST geo P C km|GEOHASH geo P|GEOPOS geo P none|"
    "GEORADIUS geo 15 37 200 km ASC|GEORADIUSBYMEMBER geo P 200 km ASC|GEOSEARCH geo FROMMEMBER P BYRADIUS 200 km ASC|"
    "GEOSEARCHSTORE geo2 geo FROMMEMBER P BYRADIUS 200 km ASC|GEORADIUS_RO geo 15 37 200 km ASC|"
    "PFADD hll a b c|PFCOUNT hll|PFMERGE hll2 hll|PFDEBUG ENCODING hll|"
    "XADD st 1-1 f v|XADD st 2-1 g w|XLEN st|XRANGE st - +|XREVRANGE st + -|XREAD COUNT 1 STREAMS st 0|"
    "XREAD BLOCK 1 STREAMS st $|XGROUP CREATE st grp 0|XREADGROUP GROUP grp me COUNT 1 STREAMS st >|XACK st grp 1-1|"
    "XPENDING st grp|XCLAIM st grp me 0 1-1|XAUTOCLAIM st grp me 0 0|XINFO STREAM none|XDEL st 1-1|XTRIM st MAXLEN 1|"
    "XSETID st 9-9|XGROUP DESTROY st grp|"
    "SORT ints2|SORT_RO ints2|SORT l4 ALPHA|PUBLISH c hello|SPUBLISH c hello|PUBSUB CHANNELS|PUBSUB NUMSUB c|PING|"
    "PING text|ECHO text|EVAL_RO return|SCRIPT EXISTS x|SCRIPT FLUSH|FUNCTION LIST|FUNCTION STATS|WATCH s|UNWATCH|"
    "MULTI;SET m 1;GET m;MGET m none;HGETALL none;EXEC|MULTI;GET m;DISCARD|MULTI;WRONG;EXEC|EXEC|DISCARD|"
    "OBJECT REFCOUNT m|READONLY|READWRITE|ASKING|AUTH wrong|NOSUCHCOMMAND x|GET|SELECT 99|SELECT x|TOUCH|FLUSHALL"
)


_KINDS = "string|integer|double|null|array|set|map|attrib|push|bignum|true|false|verbatim"


def curated() -> list[bytes]:
    sent = [b"".join(command(*one.split(" ")) for one in words.split(";")) for words in _WORDS.split("|")]
    sent += [
        command("EVAL", "return {1,'two',{3,{ok='fine'}},false,true,redis.error_reply('ERR no')}", "0"),
        command("EVAL", "redis.setresp(3); return redis.call('HGETALL', KEYS[1])", "1", "h"),
        command("EVAL", "return redis.call('NOPE')", "0"),
        command("EVALSHA", "0" * 40, "0"),
        command("FUNCTION", "LOAD", "#!lua name=l\nredis.register_function('f', function() return 1 end)"),
        command("FCALL", "f", "0") + command("FCALL_RO", "f", "0") + command("FUNCTION", "DELETE", "l"),
        command("SET", "binary", bytes(range(256)) * 40) + command("GET", "binary"),
        command("SET", "", "") + command("GET", ""),
        *(command("DEBUG", "PROTOCOL", kind) for kind in _KINDS.split("|")),
        b"PING\r\n",
        b"set 'an inline' \"one\\x41\"\r\n",
        b"get 'an inline'\r\n",
        b"\r\n*0\r\n*-1\r\n",
        command("RPUSH", "many", *map(str, range(2000))) + command("LRANGE", "many", "0", "-1"),
        command("MGET", *(f"none{number}" for number in range(3000))),
    ]
    return sent


def every_command(redis: Redis) -> Iterator[bytes]:
    """Each command that the server knows, with some arguments: mostly errors, and what it says of them."""
    with Wire(redis.port) as wire:
        wire.send(command("COMMAND", "LIST"))
        lines = wire.socket.makefile("rb")
        names = [lines.readline() and lines.readline().strip().decode() for _ in range(int(lines.readline()[1:]))]
    for name in sorted(names):
        if name.upper() in _LEFT_OUT.split():
            continue
        for words in ((), ("k",), ("k", "1"), ("k", "1", "x"), ("k", "0", "1", "x")):
            yield command("SET", "k", "v")
            yield command(name, *words)
        yield command("SELECT", "0")


def answers(port: int, sent: list[bytes], resp3: bool, pipelined: bool) -> list[bytes]:
    """The bytes that answer each, found by an ECHO behind it."""
    chance = random.Random(7)
    with Wire(port, timeout=5) as wire:
        lines = wire.socket.makefile("rb", buffering=1 << 16)

        def until(mark: bytes) -> bytes:
            data = b""
            while not data.endswith(mark):
                line = lines.readline()
                assert line, f"closed after {data[-200:]!r}"
                data += line
            return data

        if resp3:
            wire.send(command("HELLO", "3") + command("ECHO", "hello"))
            until(b"hello\r\n")
        marks = [b"mark-%d" % number for number in range(len(sent))]
        stream = [one + command("ECHO", mark) for one, mark in zip(sent, marks, strict=True)]
        if not pipelined:
            found = []
            for one, mark in zip(stream, marks, strict=True):
                cut = chance.randrange(len(one))
                wire.send(one[:cut])
                wire.send(one[cut:])
                found.append(until(mark + b"\r\n"))
            return found
        found = []
        for begin in range(0, len(stream), 50):
            wire.send(b"".join(stream[begin : begin + 50]))
            found += [until(mark + b"\r\n") for mark in marks[begin : begin + 50]]
        return found


@pytest.mark.parametrize("resp3", [False, True], ids=["resp2", "resp3"])
@pytest.mark.parametrize("pipelined", [False, True], ids=["one-by-one", "pipelined"])
@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_the_same_bytes_through_the_proxy(
    tmp_path_factory: pytest.TempPathFactory, resp3: bool, pipelined: bool, guarded: bool
) -> None:
    direct, behind = (Redis(tmp_path_factory.mktemp(name)) for name in ("direct", "behind"))
    try:
        sent = curated() + list(every_command(direct)) if not guarded else curated()
        with proxied(behind.port, (lambda _: "pass") if guarded else None) as proxy:
            wanted = answers(direct.port, sent, resp3, pipelined)
            found = answers(proxy.port, sent, resp3, pipelined)
            lookups = proxy.found()
    finally:
        direct.kill()
        behind.kill()
    different = [(one, want, got) for one, want, got in zip(sent, wanted, found, strict=True) if want != got]
    assert different == []
    counts = proxy.proxy.counts
    assert (counts.unread_bytes, counts.unfollowed, counts.malformed) == (0, 0, 0)
    assert len(lookups) == counts.lookups > 3000
    assert counts == ProxyCounts(
        connections=1,
        lookups=counts.lookups,
        unclear_lookups=counts.unclear_lookups,
        failed_lookups=counts.failed_lookups,
    )
