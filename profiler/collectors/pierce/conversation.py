"""What one client and one Redis say to each other: which reply answers which command, and which look-ups that were.

Replies come in the order of their commands, with these exceptions, all known here: push frames (RESP3) and messages of
subscriptions (RESP2) answer nothing; one SUBSCRIBE is answered once per channel; CLIENT REPLY OFF and SKIP leave
replies out; MONITOR prints lines of its own; what MULTI queues is answered inside the reply of EXEC. State that depends
on success (user, database, MULTI) changes when the reply is seen, not when the command is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from spikeprof.profiler.collectors.pierce.found import Found, ProxyCounts
from spikeprof.profiler.collectors.pierce.replies import EMPTY, ERROR, NIL, SOME, Reply
from spikeprof.profiler.collectors.pierce.resp import Command

#: Commands whose replies may be outstanding on one connection before it is no longer followed.
PENDING_MAX = 250_000

#: Reads whose one reply says of one key whether it is there; nil = miss.
_SINGLE = frozenset((b"GET", b"GETEX", b"GETDEL", b"HGET"))
LOOKUPS = _SINGLE | {b"MGET", b"HMGET", b"HGETALL", b"EXISTS"}
_SUBSCRIBES = frozenset((b"SUBSCRIBE", b"PSUBSCRIBE", b"SSUBSCRIBE", b"UNSUBSCRIBE", b"PUNSUBSCRIBE", b"SUNSUBSCRIBE"))
_SESSION = frozenset((b"AUTH", b"HELLO", b"SELECT", b"MULTI", b"EXEC", b"DISCARD", b"RESET", b"MONITOR"))
#: What may rightly take long to answer.
_BLOCKING = frozenset(
    (
        *(b"BLPOP", b"BRPOP", b"BLMOVE", b"BLMPOP", b"BZPOPMIN", b"BZPOPMAX", b"BZMPOP", b"BRPOPLPUSH", b"XREAD"),
        *(b"XREADGROUP", b"WAIT", b"WAITAOF", b"EVAL", b"EVALSHA", b"EVAL_RO", b"EVALSHA_RO", b"FCALL", b"FCALL_RO"),
        *(b"MIGRATE", b"DEBUG"),
    )
)
_STATE = _SESSION | _SUBSCRIBES | _BLOCKING | {b"CLIENT", b"SYNC", b"PSYNC", b"QUIT", b"SHUTDOWN"}
#: Commands of which the arguments are needed; those of AUTH and HELLO only for the user's name.
WANTED = LOOKUPS | _STATE
#: Allowed before a client has shown who it is: their success proves nothing.
_OPEN = frozenset((b"HELLO", b"RESET", b"QUIT"))
_MESSAGES = frozenset((b"message", b"pmessage", b"smessage"))
_PUSH, _STAR, _PLUS, _MAP, _COLON, _DOLLAR, _NULL = b">*+%:$_"
_STRINGS = frozenset((_DOLLAR, _NULL))
_REPLICATION = "replication: no replies from here on"

TenantOf = Literal["none", "user", "db"]


@dataclass(frozen=True, slots=True)
class Local:
    """A reply that the proxy gives itself, in its place among the upstream's. ``keys`` are those held back."""

    keys: tuple[bytes, ...]
    name: bytes
    count: int
    error: bytes = b""

    def reply(self, resp3: bool) -> bytes:
        """The bytes of it in the protocol that the client speaks now."""
        nil = b"_\r\n" if resp3 else b"$-1\r\n"
        if self.error:
            return self.error
        if self.name == b"EXISTS":
            return b":0\r\n"
        if self.name == b"HGETALL":
            return b"%0\r\n" if resp3 else b"*0\r\n"
        if self.name in {b"MGET", b"HMGET"}:
            return b"*%d\r\n" % self.count + nil * self.count
        return nil


class _Waiting:
    """A command that waits for its reply (subscriptions: for ``left`` of them, -1 until the first one)."""

    __slots__ = ("args", "left", "name")

    def __init__(self, name: bytes, args: list[bytes | None], left: int = 1) -> None:
        self.name = name
        self.args = args
        self.left = left


class Conversation:
    """Feed it commands and replies in their order; look-ups are added to ``found`` as their replies come."""

    def __init__(self, counts: ProxyCounts, tenant_of: TenantOf = "none", hash_fields: bool = False) -> None:
        self.found = Found()
        self.now_s = 0.0
        self.pending: deque[_Waiting | Local | bytes | None] = deque()
        """What waits for a reply: the key of a GET; None for a command that matters no further."""
        self.resp3 = False
        self.lost = ""
        """Why this connection is no longer followed; empty while it is."""
        self.admitted = False
        """Whether the upstream has carried out something for this client that it would not do for anyone."""
        self.multi_sent = False
        self._counts = counts
        self._tenant_of = tenant_of
        self._hash_fields = hash_fields
        self._tenant = ""
        self._off = self._skip = False
        self._forget()

    def _forget(self) -> None:
        self._in_multi = False
        self._queued: list[_Waiting | None] = []
        self._channels = {b"": 0, b"p": 0, b"s": 0}
        self._totals = {b"": 0, b"s": 0}
        self._monitor = False
        self._special = False
        self._user, self._db = "default", "0"
        self._name_tenant()

    def _name_tenant(self) -> None:
        self._tenant = {"none": "", "user": self._user, "db": self._db}[self._tenant_of]

    @property
    def answers_in_order(self) -> bool:
        """Whether a reply of our own would be in its place: no MULTI, no subscriber, no MONITOR, every reply wanted."""
        subscriber = not self.resp3 and any(self._totals.values())
        return not (self.multi_sent or subscriber or self._monitor or self._off or self._skip or self.lost)

    @property
    def waits_for_reply(self) -> bool:
        """Whether the upstream owes a reply to a command that takes no time of its own."""
        if not self.pending or self.lost:
            return False
        return not (isinstance(self.pending[0], _Waiting) and self.pending[0].name in _BLOCKING)

    @property
    def ended(self) -> bool:
        """Whether replies will never answer commands again: a replica of the upstream."""
        return self.lost == _REPLICATION

    def lose(self, reason: str) -> None:
        """Follow this connection no longer."""
        if not self.lost:
            self._counts.unfollowed += 1
        self.lost = reason
        self.pending.clear()

    def resume(self) -> None:
        """Follow again: the caller knows that every command so far has been answered."""
        self.lost = ""
        self.multi_sent = self._in_multi = self._off = self._skip = False
        self._queued = []

    # -- the common case ----------------------------------------------------------------------------------------------

    def gets(self, keys: list[bytes]) -> bool:
        """GET commands that the upstream gets, one per key; False, and nothing done, where they need a closer look."""
        if self._off or self._skip or self.lost:
            return False
        self.pending.extend(keys)
        if len(self.pending) > PENDING_MAX:
            self.lose(f"more than {PENDING_MAX} commands wait for replies")
        return True

    def strings(self, hits: list[bool]) -> bool:
        """Replies that are strings or nil; False, and nothing done, where they answer not only GETs."""
        pending, count = self.pending, len(hits)
        if self._special or self._in_multi or self.lost or len(pending) < count:
            return False
        keys = list(islice(pending, count))
        if not all(map(_is_key, keys)):
            return False
        if count == len(pending):
            pending.clear()
        else:
            for _ in range(count):
                pending.popleft()
        self.admitted = True
        self.found.run(self._tenant, self.now_s, self._db)
        self.found.keys += keys  # type: ignore[arg-type]
        self.found.hits += hits
        return True

    def lines(self, count: int) -> bool:
        """Replies of one line, no errors; False, and nothing done, where they answer what matters further."""
        pending = self.pending
        if self._special or self._in_multi or self.lost or len(pending) < count:
            return False
        if any(waiting is not None for waiting in islice(pending, count)):
            return False
        for _ in range(count):
            pending.popleft()
        self.admitted = True
        return True

    # -- commands ----------------------------------------------------------------------------------------------------

    def commands(self, commands: list[Command]) -> None:
        """Commands that the upstream gets."""
        pending = self.pending
        for args, _ in commands:
            name = args[0] or b"?"
            if name not in WANTED:
                name = name.upper()
            if name == b"GET" and len(args) == 2 and args[1] is not None:
                waiting: _Waiting | bytes | None = args[1]
            elif name in LOOKUPS and len(args) > 1:
                waiting = _Waiting(name, args)
            elif name in _STATE:
                waiting = self._state_command(name, args)
                if waiting is None:
                    if self.lost:
                        return
                    continue
            else:
                waiting = None
            if self._off or self._skip:
                self._unanswered(waiting)
            else:
                pending.append(waiting)
        if len(pending) > PENDING_MAX:
            self.lose(f"more than {PENDING_MAX} commands wait for replies")

    def _state_command(self, name: bytes, args: list[bytes | None]) -> _Waiting | None:
        """What to wait for; None where the command itself was dealt with."""
        if name == b"CLIENT":
            return self._client(args)
        if name in {b"SYNC", b"PSYNC"}:
            self.lose(_REPLICATION)
            return None
        if name in _BLOCKING:
            return _Waiting(name, args[:1])
        if name in _SUBSCRIBES:
            left = len(args) - 1 if len(args) > 1 else -1
            return _Waiting(name, args[:1], left)
        if name == b"MULTI":
            self.multi_sent = True
        elif name in {b"EXEC", b"DISCARD", b"RESET"}:
            self.multi_sent = False
        if name == b"RESET":
            self._off = self._skip = False
        if name in {b"AUTH", b"HELLO"}:
            args = [args[0], _user_of(name, args)]  # the password is not kept
        return _Waiting(name, args)

    def _client(self, args: list[bytes | None]) -> _Waiting | None:
        words = [(arg or b"").upper() for arg in args[1:3]]
        if words[:1] != [b"REPLY"] or len(args) != 3 or words[1] not in {b"ON", b"OFF", b"SKIP"}:
            return _Waiting(b"CLIENT", args[:1])
        if self.multi_sent:
            self.lose("CLIENT REPLY inside MULTI")
            return None
        if words[1] == b"ON":
            self._off = self._skip = False
            return _Waiting(b"CLIENT", args[:1])
        if words[1] == b"OFF":
            self._off = True
        elif not self._off:
            self._skip = True
        return None

    def _unanswered(self, waiting: _Waiting | bytes | None) -> None:
        self._skip = False
        if isinstance(waiting, bytes):
            self._counts.unanswered_lookups += 1
        elif waiting is not None and waiting.name in LOOKUPS:
            self._counts.unanswered_lookups += len(self._keys(waiting))

    # -- replies -----------------------------------------------------------------------------------------------------

    def replies(self, replies: list[Reply]) -> None:
        """What the upstream answered."""
        for reply in replies:
            self.reply(reply)

    def reply(self, reply: Reply) -> None:
        """One reply of the upstream."""
        if (self.lost or self._special or reply.kind == _PUSH) and self._aside(reply):
            return
        pending = self.pending
        if not pending:
            self._off = False  # it answered although it was told not to: that command was refused
            return
        waiting = pending[0]
        if waiting is None:
            pending.popleft()
            self.admitted = self.admitted or not reply.is_error
            if self._in_multi and reply.text == b"QUEUED":
                self._queued.append(None)
            return
        if isinstance(waiting, Local):
            return
        if isinstance(waiting, bytes):
            waiting = _Waiting(b"GET", [b"GET", waiting])
        if waiting.name in _SUBSCRIBES and not self._in_multi:
            self._subscribed(waiting, reply)
            return
        pending.popleft()
        if self._in_multi and waiting.name not in {b"EXEC", b"DISCARD", b"RESET", b"QUIT"}:
            if reply.text == b"QUEUED":
                self._queued.append(waiting)
            return
        self.admitted = self.admitted or not (reply.is_error or waiting.name in _OPEN)
        if waiting.name in LOOKUPS:
            self._lookup(waiting, reply)
        else:
            self._state_reply(waiting, reply)

    def _aside(self, reply: Reply) -> bool:
        """Whether this frame answers no command."""
        if self.lost or (self._monitor and reply.kind == _PLUS and reply.text[:1].isdigit()):
            return True
        head = reply.items.head if reply.items else b""
        if reply.kind == _PUSH:
            waiting = self.pending[0] if self.pending else None
            return not (isinstance(waiting, _Waiting) and head.upper() == waiting.name)
        return not self.resp3 and reply.kind == _STAR and head in _MESSAGES and any(self._totals.values())

    def _subscribed(self, waiting: _Waiting, reply: Reply) -> None:
        head = reply.items.head if reply.items else b""
        if head.upper() != waiting.name:  # an error
            self.pending.popleft()
            return
        assert reply.items
        kind = head[:1] if head[:1] in {b"p"} or head.startswith((b"ss", b"sun")) else b""
        pool = b"s" if kind == b"s" else b""
        if waiting.left < 0:
            waiting.left = max(1, self._channels[kind])
        total = max(0, reply.items.last)
        self._channels[kind] += (total > self._totals[pool]) - (total < self._totals[pool])
        self._totals[pool] = total
        self._special = self._monitor or any(self._totals.values())
        waiting.left -= 1
        if not waiting.left:
            self.pending.popleft()

    def _state_reply(self, waiting: _Waiting, reply: Reply) -> None:
        name = waiting.name
        if name in {b"EXEC", b"DISCARD"}:
            queued, self._queued, self._in_multi = self._queued, [], False
            if name == b"EXEC":
                self._executed(queued, reply)
        elif not reply.is_error:
            self._carried_out(name, waiting.args, reply.kind == _MAP)

    def _carried_out(self, name: bytes, args: list[bytes | None], is_map: bool) -> None:
        if name == b"MULTI":
            self._in_multi = True
        elif name == b"RESET":
            self.resp3 = self.admitted = False
            self._forget()
        elif name == b"MONITOR":
            self._monitor = self._special = True
        elif name == b"SELECT":
            self._db = (args[1] or b"?").decode("ascii", "replace") if len(args) > 1 else "?"
        elif name in {b"AUTH", b"HELLO"}:
            if name == b"HELLO":
                self.resp3 = is_map
            user = args[1]
            if user:
                self.admitted = True
                self._user = user.decode("utf-8", "backslashreplace")
        self._name_tenant()

    def _executed(self, queued: list[_Waiting | None], reply: Reply) -> None:
        if reply.items is None or reply.is_nil:
            return  # aborted: nothing was looked up
        flags = reply.items.flags
        if any(waiting is not None and waiting.name in _SUBSCRIBES for waiting in queued):
            self.lose("a subscription inside MULTI")
            return
        for at, waiting in enumerate(queued):
            if waiting is None or at >= len(flags):
                continue
            if waiting.name in LOOKUPS:
                self._answered(waiting, flags[at], -1, reply.items.nested.get(at, bytearray()))
            elif flags[at] != ERROR:
                self._carried_out(waiting.name, waiting.args, False)

    # -- look-ups ----------------------------------------------------------------------------------------------------

    def _keys(self, waiting: _Waiting) -> list[bytes | None]:
        name, args = waiting.name, waiting.args
        if name in {b"MGET", b"EXISTS"}:
            return args[1:]
        if not self._hash_fields or name not in {b"HGET", b"HMGET"}:
            return args[1:2]
        key = args[1]
        return [None if key is None or field is None else key + b"/" + field for field in args[2:]]

    def _lookup(self, waiting: _Waiting, reply: Reply) -> None:
        if waiting.name in _SINGLE:
            if reply.kind in _STRINGS:
                if self._hash_fields and waiting.name == b"HGET":
                    self._add(self._keys(waiting)[0], reply.value >= 0)
                else:
                    self._add(waiting.args[1], reply.value >= 0)
                return
            if not reply.is_error:
                self.lose(f"a reply of type {chr(reply.kind)!r} to {waiting.name.decode()}")
                return
        flag = ERROR if reply.is_error else EMPTY if reply.value == 0 else SOME
        nested = reply.items.flags if reply.items else bytearray()
        self._answered(waiting, flag, reply.value if reply.kind == _COLON else -1, nested)

    def _answered(self, waiting: _Waiting, flag: int, value: int, nested: bytearray) -> None:
        """``flag`` of the reply as a whole, ``value`` a number where known, ``nested`` flags of its elements."""
        name, keys = waiting.name, self._keys(waiting)
        if flag == ERROR:
            self._counts.failed_lookups += len(keys)
        elif name in {b"MGET", b"HMGET"} and (name == b"MGET" or self._hash_fields):
            if len(nested) != len(keys):
                self._counts.unclear_lookups += len(keys)
                return
            for key, found in zip(keys, nested, strict=True):
                self._add(key, found != NIL)
        elif name == b"HMGET":
            self._add(keys[0], any(nested))
        elif name in {b"HGETALL", b"EXISTS"}:
            if flag == SOME and name == b"EXISTS" and len(keys) > 1 and value != len(keys):
                self._counts.unclear_lookups += len(keys)
                return
            for key in keys:
                self._add(key, flag == SOME)
        else:
            self._add(keys[0], flag != NIL)

    def _add(self, key: bytes | None, hit: bool) -> None:
        if key is None:
            self._counts.unclear_lookups += 1
            return
        found = self.found
        found.run(self._tenant, self.now_s, self._db)
        found.keys.append(key)
        found.hits.append(hit)

    def answered_locally(self, local: Local) -> None:
        """The proxy answered in place of the upstream: what it held back counts as missed.

        Otherwise an attack would be over for the detector as soon as it is held back, and let through again.
        """
        for key in local.keys:
            self._add(key, False)


def _is_key(waiting: object) -> bool:
    return waiting.__class__ is bytes


def _user_of(name: bytes, args: list[bytes | None]) -> bytes | None:
    """The user that AUTH or HELLO names; None where none is."""
    if name == b"AUTH":
        return b"default" if len(args) == 2 else args[1] if len(args) > 2 else None
    words = [(arg or b"").upper() for arg in args[2:]]
    at = words.index(b"AUTH") if b"AUTH" in words else -1
    return args[2 + at + 1] if at >= 0 and len(args) > at + 3 else None
