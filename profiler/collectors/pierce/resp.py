"""RESP requests, read incrementally: bytes in, commands out, with the place where each ends.

Only the arguments that look-ups need are kept. Long strings are stepped over as they come and never held. There is no
loop over bytes. Source: the RESP specification, https://redis.io/docs/latest/develop/reference/protocol-spec/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: An argument longer than this is stepped over and given as None.
ARG_BYTES_MAX = 16 * 1024
#: A command's arguments after this many are stepped over; a None at the end stands for them.
ARGS_MAX = 65_536
#: Long arguments of one command that are kept, in all; those after are stepped over, and two None stand for them.
ARGS_BYTES_MAX = 4 << 20
_LONG_BYTES = 512
#: What Redis takes for a header or an inline command (PROTO_INLINE_MAX_SIZE).
LINE_BYTES_MAX = 64 * 1024

#: A command's arguments, None for one that was too long, and the offset of its end in the bytes that were fed.
Command = tuple[list[bytes | None], int]

#: Headers that come often, read.
SMALL = {b"%d" % number: number for number in range(-1, 2048)}

_STAR, _DOLLAR = b"*$"
_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}").fullmatch
_QUOTED = re.compile(rb"""(["'])(.*?)\1(?=\s|$)|(\S+)""", re.DOTALL)


_GETS = re.compile(rb"\*2\r\n\$3\r\n(?:GET|get)\r\n\$([0-9]{1,5})\r\n([^\r\n]*)\r\n").findall
_GET_BYTES = len(b"*2\r\n$3\r\nGET\r\n$\r\n\r\n")


def only_gets(data: bytes) -> list[bytes] | None:
    """The keys where ``data`` is complete GET commands and nothing else; None where it is not, or may not be.

    The pattern's matches cannot overlap: they are all of the data when their lengths add up to its length.
    """
    found = _GETS(data)
    if not found:
        return None
    sizes, keys = zip(*found, strict=True)
    if _GET_BYTES * len(keys) + sum(map(len, sizes)) + sum(map(len, keys)) != len(data):
        return None
    return list(keys) if list(map(int, sizes)) == list(map(len, keys)) else None


def integer(text: bytes) -> int | None:
    """The number that a header states, None where it is none."""
    return int(text) if _INTEGER(text) else None


class RequestParser:
    """Commands of one client, RESP arrays and inline ones.

    ``wanted``: upper-case names of which the arguments are kept; of others only the name is. ``words_max``: how many
    words are kept of some of them. ``broken`` is the reason why reading ended, empty while it goes on: Redis answers
    such bytes with an error of its own and closes. ``name`` is that of the command that is still incomplete, in upper
    case, empty until it is known.
    """

    def __init__(self, wanted: frozenset[bytes], words_max: Mapping[bytes, int] | None = None) -> None:
        self.broken = ""
        self.name = b""
        self._wanted = wanted
        self._words_max = words_max or {}
        self._most = ARGS_MAX
        self._kept_bytes = 0
        self._tail = b""
        self._skip_bytes = 0
        self._left = 0
        self._keep = False
        self._args: list[bytes | None] = []

    @property
    def idle(self) -> bool:
        """Whether the last byte fed ended a command, so that another one may begin."""
        return not (self._tail or self._skip_bytes or self._left or self.broken)

    def step_over(self, size: int) -> bool:
        """Whether the next ``size`` bytes lie within a long string, and are counted as read."""
        if self._skip_bytes <= size:
            return False
        self._skip_bytes -= size
        return True

    def feed(self, data: bytes) -> list[Command]:
        """The commands that end in ``data``; an end lies in 0 … len(data)."""
        commands: list[Command] = []
        shift = len(self._tail)
        if shift:
            data = self._tail + data
            self._tail = b""
        pos, end = 0, len(data)
        while pos < end and not self.broken:
            if self._skip_bytes:
                step = min(self._skip_bytes, end - pos)
                self._skip_bytes -= step
                pos += step
            elif self._left:
                pos = self._arguments(data, pos, end)
            elif data[pos] == _STAR:
                pos = self._header(data, pos, end)
                if not self._left:
                    continue
                if pos < end:
                    pos = self._arguments(data, pos, end)
            else:
                pos = self._inline(data, pos, end)
            if not (self._left or self._skip_bytes) and self._args:
                commands.append((self._args, pos - shift))
                self._args, self.name = [], b""
        return commands

    def _header(self, data: bytes, pos: int, end: int) -> int:
        eol = data.find(b"\r\n", pos)
        if eol < 0:
            return self._wait(data, pos, end)
        count = SMALL.get(data[pos + 1 : eol])
        if count is None:
            count = integer(data[pos + 1 : eol])
        if count is None:
            self.broken = "invalid multibulk length"
        elif count > 0:
            self._left, self._keep = count, True
        return eol + 2

    def _arguments(self, data: bytes, pos: int, end: int) -> int:
        args, left, small, find = self._args, self._left, SMALL, data.find
        while left and pos < end:
            if data[pos] != _DOLLAR:
                self.broken = f"expected '$', got {chr(data[pos])!r}"
                break
            eol = find(b"\r\n", pos)
            if eol < 0:
                pos = self._wait(data, pos, end)
                break
            size = small.get(data[pos + 1 : eol])
            if size is None:
                size = integer(data[pos + 1 : eol])
            if size is None or size < 0:
                self.broken = "invalid bulk length"
                break
            stop = eol + 4 + size
            if stop > end:
                if size <= ARG_BYTES_MAX:
                    pos = self._wait(data, pos, end)
                    break
                self._skip_bytes = stop - end
            if self._keep:
                args.append(data[eol + 2 : stop - 2] if size <= ARG_BYTES_MAX else None)
                if len(args) == 1:
                    self.name = (args[0] or b"?").upper()
                    self._keep = self.name in self._wanted
                    self._most = self._words_max.get(self.name, ARGS_MAX)
                    self._kept_bytes = 0
                elif len(args) == self._most:
                    if self._most == ARGS_MAX:
                        args.append(None)
                    self._keep = False
                elif size > _LONG_BYTES:
                    self._keep_long(size)
            left -= 1
            pos = stop
        self._left = left
        return min(pos, end)

    def _keep_long(self, size: int) -> None:
        """Keep no more of a command whose long arguments are too much in all."""
        self._kept_bytes += min(size, ARG_BYTES_MAX)
        if self._kept_bytes > ARGS_BYTES_MAX:
            self._args += (None, None)  # one of them stands where a key may be
            self._keep = False

    def _inline(self, data: bytes, pos: int, end: int) -> int:
        eol = data.find(b"\n", pos)
        if eol < 0:
            return self._wait(data, pos, end)
        line = data[pos:eol]
        if b'"' in line or b"'" in line:
            # An escape would have to be undone to know the argument: it counts as one that is not known.
            found = (quoted if quote else plain for quote, quoted, plain in _QUOTED.findall(line))
            self._args = [None if b"\\" in arg else arg for arg in found]
        else:
            self._args = list(line.split())
        return eol + 1

    def _wait(self, data: bytes, pos: int, end: int) -> int:
        """Keep the token that begins at ``pos`` until the rest of it comes."""
        if end - pos > LINE_BYTES_MAX:
            self.broken = f"a header or an inline command of more than {LINE_BYTES_MAX} bytes"
        self._tail = data[pos:]
        return end
