"""Which keys a command writes, so that they are known to exist before anybody looks them up.

Source: the command reference, https://redis.io/docs/latest/commands/, and the key positions that COMMAND states.
"""

from __future__ import annotations

from collections.abc import Sequence

from spikeprof.profiler.collectors.pierce.resp import ARGS_MAX


def _names(text: str) -> frozenset[bytes]:
    return frozenset(text.encode().split())


#: Write their first key.
_FIRST = _names(
    "SET SETEX PSETEX SETNX GETSET APPEND SETRANGE SETBIT BITFIELD INCR INCRBY INCRBYFLOAT DECR DECRBY "
    "HSET HSETNX HMSET HINCRBY HINCRBYFLOAT HSETEX LPUSH RPUSH LPUSHX RPUSHX LINSERT LSET SADD ZADD ZINCRBY GEOADD "
    "VADD XADD XSETID PFADD PFMERGE RESTORE RESTORE-ASKING SUNIONSTORE SINTERSTORE SDIFFSTORE ZUNIONSTORE ZINTERSTORE "
    "ZDIFFSTORE ZRANGESTORE GEOSEARCHSTORE"
)
#: Write the key that is their second argument.
_SECOND = _names("RENAME RENAMENX COPY SMOVE RPOPLPUSH BRPOPLPUSH LMOVE BLMOVE BITOP XGROUP")
#: Write every key of pairs of key and value.
_PAIRS = _names("MSET MSETNX")
#: Write the key behind STORE or STOREDIST, where that is there.
_STORE = _names("SORT GEORADIUS GEORADIUSBYMEMBER")
#: Make no key that was not there.
_NONE = _names(
    # strings, and keys of any kind
    "GET GETDEL GETEX GETRANGE SUBSTR STRLEN MGET LCS GETBIT BITCOUNT BITPOS BITFIELD_RO PFCOUNT DEL UNLINK EXISTS "
    "EXPIRE PEXPIRE EXPIREAT PEXPIREAT EXPIRETIME PEXPIRETIME PERSIST TTL PTTL TYPE TOUCH DUMP OBJECT KEYS SCAN "
    "RANDOMKEY DELEX DIGEST SORT_RO MOVE MIGRATE SWAPDB FLUSHDB FLUSHALL DBSIZE "
    # hashes, lists, sets, sorted sets, places, streams
    "HGET HMGET HGETALL HKEYS HVALS HLEN HEXISTS HSTRLEN HRANDFIELD HSCAN HDEL HGETDEL HGETEX HEXPIRE HPEXPIRE "
    "HEXPIREAT HPEXPIREAT HEXPIRETIME HPEXPIRETIME HPERSIST HTTL HPTTL "
    "LRANGE LINDEX LLEN LPOS LPOP RPOP LREM LTRIM LMPOP BLPOP BRPOP BLMPOP "
    "SMEMBERS SISMEMBER SMISMEMBER SCARD SRANDMEMBER SSCAN SPOP SREM SUNION SINTER SINTERCARD SDIFF "
    "ZRANGE ZREVRANGE ZRANGEBYSCORE ZREVRANGEBYSCORE ZRANGEBYLEX ZREVRANGEBYLEX ZRANK ZREVRANK ZSCORE ZMSCORE ZCARD "
    "ZCOUNT ZLEXCOUNT ZRANDMEMBER ZSCAN ZREM ZREMRANGEBYRANK ZREMRANGEBYSCORE ZREMRANGEBYLEX ZPOPMIN ZPOPMAX ZMPOP "
    "BZPOPMIN BZPOPMAX BZMPOP ZUNION ZINTER ZINTERCARD ZDIFF "
    "GEOSEARCH GEODIST GEOHASH GEOPOS GEORADIUS_RO GEORADIUSBYMEMBER_RO "
    "XRANGE XREVRANGE XLEN XREAD XREADGROUP XACK XACKDEL XDEL XDELEX XTRIM XPENDING XINFO XCLAIM XAUTOCLAIM "
    # scripts that may not write
    "EVAL_RO EVALSHA_RO FCALL_RO SCRIPT FUNCTION "
    # the connection, and the server
    "AUTH HELLO SELECT PING ECHO QUIT RESET CLIENT MULTI EXEC DISCARD WATCH UNWATCH WAIT WAITAOF ASKING READONLY "
    "READWRITE SUBSCRIBE PSUBSCRIBE SSUBSCRIBE UNSUBSCRIBE PUNSUBSCRIBE SUNSUBSCRIBE PUBLISH SPUBLISH PUBSUB MONITOR "
    "INFO COMMAND CONFIG ACL LATENCY SLOWLOG MEMORY LOLWUT TIME ROLE SAVE BGSAVE BGREWRITEAOF LASTSAVE SHUTDOWN "
    "SYNC PSYNC REPLCONF CLUSTER FAILOVER"
)
_STORE_WORDS = frozenset((b"STORE", b"STOREDIST"))

#: Commands of which arguments are needed to tell what they write.
WRITES = _FIRST | _SECOND | _PAIRS | _STORE
#: How many words of them, where not all: values are not held.
WORDS_MAX = dict.fromkeys(_FIRST, 2) | dict.fromkeys(_SECOND, 3)


def written(name: bytes, args: Sequence[bytes | None]) -> list[bytes] | None:
    """The keys that a command may write; ``name`` is args[0] in upper case. None where they cannot be told.

    Not to be told: those of scripts, which need not be among the arguments; of modules, of newer servers, and of the
    server's own means to load data; a key that is too long to be kept or quoted, and a command of too many words.
    """
    if name in _NONE:
        return []
    if name not in WRITES or len(args) > ARGS_MAX:
        return None
    if name in _FIRST:
        keys = args[1:2]
    elif name in _SECOND:
        keys = args[2:3]
    elif name in _PAIRS:
        keys = args[1::2]
    else:
        stores = (at for at, arg in enumerate(args) if at > 1 and (arg or b"").upper() in _STORE_WORDS)
        keys = [key for at in stores for key in args[at + 1 : at + 2]]
    told = [key for key in keys if key is not None]
    return told if len(told) == len(keys) else None
