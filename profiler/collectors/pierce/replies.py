"""RESP2 and RESP3 replies, read incrementally: bytes in, replies out, with the place where each ends.

Nothing is decoded that look-ups do not need: whether a reply is nil, a number, or how many elements it has. Long
strings are stepped over as they come and never held. There is no loop over bytes. Source: the RESP specification,
https://redis.io/docs/latest/develop/reference/protocol-spec/, and for streamed strings and aggregates
https://github.com/redis/redis-specifications/blob/master/protocol/RESP3.md.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from spikeprof.profiler.collectors.pierce.resp import LINE_BYTES_MAX, SMALL, integer

#: Elements of an aggregate whose state is kept; the rest is only counted.
ITEMS_MAX = 1 << 20
#: How deep aggregates may nest.
DEPTH_MAX = 1024
#: Bytes kept of a line or of the first element of an aggregate: enough to tell replies apart.
HEAD_BYTES = 64

#: What an element of an aggregate is.
NIL, EMPTY, SOME, ERROR = 0, 1, 2, 3

_STAR, _DOLLAR, _PLUS, _MINUS, _COLON, _PUSH = b"*$+-:>"
_MAP, _SET, _ATTRIBUTE, _NULL, _BOOL, _DOUBLE, _BIG, _BLOB_ERROR, _VERBATIM, _PART, _END = b"%~|_#,(!=;."
_LINES = frozenset((_PLUS, _MINUS, _COLON, _NULL, _BOOL, _DOUBLE, _BIG))
_BULKS = frozenset((_DOLLAR, _BLOB_ERROR, _VERBATIM))
_AGGREGATES = frozenset((_STAR, _PUSH, _MAP, _SET, _ATTRIBUTE))
_ERRORS = frozenset((_MINUS, _BLOB_ERROR))
_NILS = frozenset((_DOLLAR, _STAR, _NULL))
_COUNTED = frozenset((_COLON, _STAR, _MAP, _SET, _BOOL))
_STRINGS = re.compile(rb"\$([0-9]{1,5})\r\n([^\r\n]*)\r\n|(\$-1|_)\r\n").findall
_SIMPLE = re.compile(rb"[+:]([^\r\n]*)\r\n").findall
_STRING_BYTES, _LINE_BYTES = len(b"$\r\n\r\n"), len(b"\r\n")
_STREAMED = 0  # kind of an open streamed string: no type byte of the protocol


def only_strings(data: bytes) -> list[bool] | None:
    """For each reply whether it is there, where ``data`` is complete strings and nils and nothing else.

    None where it is not, or may not be. The pattern's matches cannot overlap: they are all of the data when their
    lengths add up to its length.
    """
    found = _STRINGS(data)
    if not found:
        return None
    sizes, texts, nils = zip(*found, strict=True)
    there = len(nils) - sum(map(bool, nils))
    total = _STRING_BYTES * there + _LINE_BYTES * (len(nils) - there)
    total += sum(map(len, sizes)) + sum(map(len, texts)) + sum(map(len, nils))
    if total != len(data) or [int(size or 0) for size in sizes] != list(map(len, texts)):
        return None
    return [not nil for nil in nils]


def only_lines(data: bytes) -> int:
    """How many replies ``data`` is, where it is complete lines that are no errors and nothing else; 0 where not."""
    found = _SIMPLE(data)
    return len(found) if sum(map(len, found)) + (1 + _LINE_BYTES) * len(found) == len(data) else 0


class Items:
    """The elements of an aggregate: ``flags`` one of NIL, EMPTY, SOME, ERROR each (at most ITEMS_MAX are kept).

    ``nested``: flags of the elements' own elements, by position. ``head``: the first element where that is a short
    string. ``last``: the last number among the elements, -1 without one.
    """

    __slots__ = ("flags", "head", "last", "nested")

    def __init__(self) -> None:
        self.flags = bytearray()
        self.nested: dict[int, bytearray] = {}
        self.head = b""
        self.last = -1


class Reply(NamedTuple):
    """One reply: its type byte; length, number or count (-1 for nil); its end in the bytes fed; what it holds.

    ``text`` is the beginning of a line, ``items`` the elements of an aggregate.
    """

    kind: int
    value: int
    end: int
    text: bytes = b""
    items: Items | None = None

    @property
    def is_nil(self) -> bool:
        """Whether it says that there is nothing."""
        return self.value < 0 and self.kind in _NILS

    @property
    def is_error(self) -> bool:
        """Whether it is an error, short or long."""
        return self.kind in _ERRORS


class _Open:
    """An aggregate that is not complete: ``left`` elements, -1 while it is streamed."""

    __slots__ = ("count", "items", "kind", "left")

    def __init__(self, kind: int, count: int) -> None:
        self.kind = kind
        self.count = 0 if count < 0 else count
        self.left = count * 2 if kind in (_MAP, _ATTRIBUTE) and count > 0 else count
        self.items = Items()


class ReplyParser:
    """Replies of one server, RESP2 and RESP3 alike. ``broken`` as with RequestParser; then it is no RESP."""

    def __init__(self) -> None:
        self.broken = ""
        self._tail = b""
        self._skip_bytes = 0
        self._line: tuple[int, bytes] | None = None
        self._bulk: tuple[int, int] | None = None
        self._stack: list[_Open] = []
        self._replies: list[Reply] = []
        self._shift = 0

    @property
    def idle(self) -> bool:
        """Whether the last byte fed ended a reply."""
        return not (self._tail or self._skip_bytes or self._stack or self._line)

    def step_over(self, size: int) -> bool:
        """Whether the next ``size`` bytes lie within a long string, and are counted as read."""
        if self._skip_bytes <= size:
            return False
        self._skip_bytes -= size
        return True

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that end in ``data``; an end lies in 0 … len(data). Attributes belong to what follows them."""
        self._replies = replies = []
        self._shift = shift = len(self._tail)
        if shift:
            data = self._tail + data
            self._tail = b""
        pos, end = 0, len(data)
        while pos < end and not self.broken:
            if self._skip_bytes:
                pos = self._skip(pos, end)
                continue
            if self._line:
                pos = self._long_line(data, pos, end)
                continue
            eol = data.find(b"\r\n", pos)
            if eol < 0:
                self._begin_line(data, pos)
                break
            kind = data[pos]
            if kind == _DOLLAR and not self._stack:  # the reply that most look-ups get
                size = SMALL.get(data[pos + 1 : eol])
                stop = eol + 2 if size == -1 else eol + 4 + (size or 0)
                if size is not None and stop <= end and data.startswith(b"\r\n", stop - 2):
                    replies.append(Reply(kind, size, stop - shift))
                    pos = stop
                    continue
            pos = self._token(data, kind, pos, eol, end)
            if self._stack and pos < end and data[pos] == _DOLLAR:
                pos = self._strings(data, pos, end)
        return replies

    def _token(self, data: bytes, kind: int, pos: int, eol: int, end: int) -> int:
        if kind in _LINES:
            self._end_line(kind, data[pos + 1 : min(eol, pos + 1 + HEAD_BYTES)], eol - pos - 1, eol + 2)
            return eol + 2
        if kind == _END and eol == pos + 1:
            self._close(eol + 2)
            return eol + 2
        header = data[pos + 1 : eol]
        streamed = header == b"?"
        size = -1 if streamed else integer(header)
        if size is None or size < -1 or (kind not in _AGGREGATES and kind not in _BULKS and kind != _PART):
            self.broken = f"not a reply of the protocol: {data[pos : min(eol, pos + 32)]!r}"
        elif kind in _AGGREGATES:
            self._open(kind, size, streamed, eol + 2)
        elif streamed and kind == _DOLLAR:
            self._push(_Open(_STREAMED, -1))
        elif kind == _PART:
            return self._part(size, eol, end)
        elif size < 0:
            self._complete(kind, -1, eol + 2, b"")
        else:
            return self._bulk_string(data, kind, size, pos, eol, end)
        return eol + 2

    def _strings(self, data: bytes, pos: int, end: int) -> int:
        """Step over the complete strings of the innermost aggregate, all but its first and last element."""
        parent, depth = self._stack[-1], len(self._stack)
        flags, left = parent.items.flags, parent.left
        if not flags or depth > 2:
            return pos
        room, find = ITEMS_MAX - len(flags), data.find
        while left > 1 and room > 0 and pos < end and data[pos] == _DOLLAR:
            eol = find(b"\r\n", pos)
            size = SMALL.get(data[pos + 1 : eol]) if eol >= 0 else None
            if size is None:
                break
            stop = eol + 2 if size < 0 else eol + 4 + size
            if stop > end or not data.startswith(b"\r\n", stop - 2):
                break
            flags.append(NIL if size < 0 else SOME)
            left -= 1
            room -= 1
            pos = stop
        parent.left = left
        return pos

    def _bulk_string(self, data: bytes, kind: int, size: int, pos: int, eol: int, end: int) -> int:
        stop = eol + 4 + size
        if stop > end:
            if size <= HEAD_BYTES:  # short: what it says may be needed
                self._tail = data[pos:]
            else:
                self._skip_bytes, self._bulk = stop - end, (kind, size)
            return end
        if data[stop - 2 : stop] != b"\r\n":
            self.broken = f"a string of {size} bytes does not end where it says"
            return end
        self._complete(kind, size, stop, data[eol + 2 : stop - 2] if size <= HEAD_BYTES else b"")
        return stop

    def _skip(self, pos: int, end: int) -> int:
        step = min(self._skip_bytes, end - pos)
        self._skip_bytes -= step
        if not self._skip_bytes and self._bulk:
            (kind, size), self._bulk = self._bulk, None
            self._complete(kind, size, pos + step, b"")
        return pos + step

    def _part(self, size: int, eol: int, end: int) -> int:
        if not self._stack or self._stack[-1].kind != _STREAMED:
            self.broken = "a part of a streamed string without its beginning"
        elif size == 0:
            total = self._stack.pop().count
            self._complete(_DOLLAR, total, eol + 2, b"")
        else:
            self._stack[-1].count += size
            stop = eol + 4 + size
            self._skip_bytes = max(0, stop - end)
            return min(stop, end)
        return eol + 2

    def _begin_line(self, data: bytes, pos: int) -> None:
        """Lines may be of any length (MONITOR prints whole commands): beyond a bound only their beginning is kept."""
        rest = data[pos:]
        if len(rest) <= LINE_BYTES_MAX:
            self._tail = rest
        elif rest[0] not in _LINES:
            self.broken = f"not a reply of the protocol: {rest[:32]!r}"
        else:
            self._line = (rest[0], rest[1 : 1 + HEAD_BYTES])
            self._tail = rest[-1:] if rest.endswith(b"\r") else b""

    def _long_line(self, data: bytes, pos: int, end: int) -> int:
        eol = data.find(b"\r\n", pos)
        if eol < 0:
            self._tail = data[-1:] if data.endswith(b"\r") else b""
            return end
        assert self._line
        (kind, text), self._line = self._line, None
        self._end_line(kind, text, HEAD_BYTES + 1, eol + 2)
        return eol + 2

    def _end_line(self, kind: int, text: bytes, length: int, end: int) -> None:
        value = length
        if kind == _COLON:
            number = integer(text)
            if number is None:
                self.broken = f"not a number: {text!r}"
                return
            value = number
        elif kind == _NULL:
            value = -1
        elif kind == _BOOL:
            value = int(text == b"t")
        self._complete(kind, value, end, text)

    def _open(self, kind: int, count: int, streamed: bool, end: int) -> None:
        if count < 0 and not streamed:
            self._complete(kind, -1, end, b"")
        elif count == 0:
            if kind != _ATTRIBUTE:
                self._complete(kind, 0, end, b"", Items())
        else:
            self._push(_Open(kind, count))

    def _push(self, frame: _Open) -> None:
        if len(self._stack) >= DEPTH_MAX:
            self.broken = f"aggregates nested more than {DEPTH_MAX} deep"
        self._stack.append(frame)

    def _close(self, end: int) -> None:
        if not self._stack or self._stack[-1].left >= 0 or self._stack[-1].kind == _STREAMED:
            self.broken = "the end of a streamed aggregate without its beginning"
            return
        self._finish(self._stack.pop(), end)

    def _finish(self, frame: _Open, end: int) -> None:
        if frame.kind != _ATTRIBUTE:
            count = frame.count // 2 if frame.kind == _MAP and frame.left < 0 else frame.count
            self._complete(frame.kind, count, end, b"", frame.items)

    def _complete(self, kind: int, value: int, end: int, text: bytes, items: Items | None = None) -> None:
        if not self._stack:
            self._replies.append(Reply(kind, value, end - self._shift, text, items))
            return
        parent = self._stack[-1]
        if len(self._stack) <= 2:
            self._record(parent.items, kind, value, text, items)
        if parent.left < 0:
            parent.count += 1
            return
        parent.left -= 1
        if not parent.left:
            self._finish(self._stack.pop(), end)

    def _record(self, into: Items, kind: int, value: int, text: bytes, items: Items | None) -> None:
        at = len(into.flags)
        if at >= ITEMS_MAX:
            return
        if not at:
            into.head = text
        if kind == _COLON:
            into.last = value
        if items is not None and len(self._stack) == 1:
            into.nested[at] = items.flags
        into.flags.append(_flag(kind, value))


def _flag(kind: int, value: int) -> int:
    if value < 0 and kind in _NILS:
        return NIL
    if kind in _ERRORS:
        return ERROR
    return EMPTY if value == 0 and kind in _COUNTED else SOME
