"""A proxied connection with a guard: it sees look-ups before they are sent, and may have the proxy answer them.

The proxy's own answers stand among the upstream's where they belong. Bytes wait here only while they are the beginning
of a look-up that is not complete.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from spikeprof.profiler.collectors.pierce.conversation import LOOKUPS, WANTED, Local
from spikeprof.profiler.collectors.pierce.link import Client
from spikeprof.profiler.collectors.pierce.resp import ARGS_MAX, RequestParser
from spikeprof.profiler.collectors.pierce.writes import WORDS_MAX, WRITES, written
from spikeprof.profiler.lookups import text_of

if TYPE_CHECKING:
    from spikeprof.profiler.collectors.pierce.proxy import Proxy

#: Bytes of an incomplete look-up that wait for the rest before the guard is asked; a longer one passes.
_HELD_BYTES_MAX = 64 * 1024
#: Keys that a client wrote before it had shown who it is; where there are more, they count as not to be told.
_UNPROVEN_MAX = 10_000
#: Least and most words of a look-up that the guard is asked of; with others the upstream has the error to tell.
_ARGUMENTS = {
    b"GET": (2, 2),
    b"GETDEL": (2, 2),
    b"GETEX": (2, 4),
    b"HGETALL": (2, 2),
    b"HGET": (3, 3),
    b"HMGET": (3, ARGS_MAX),
    b"MGET": (2, ARGS_MAX),
    b"EXISTS": (2, ARGS_MAX),
}
_LIMITED = b"-ERR spikeprof: look-ups of keys like this one are limited for now; try again later\r\n"


class GuardedClient(Client):
    """A client whose look-ups are shown to the guard before they are sent."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(proxy)
        self._held = b""
        self._passed = False
        self._unproven: list[bytes] | None = []

    def data_received(self, data: bytes) -> None:
        """Send what the guard lets pass; hold the beginning of a look-up until the rest of it is there."""
        upstream = self._upstream
        if upstream is None:
            self._wait_for_upstream(data)
            return
        if self._blind and not self._followable(data):
            self._proxy.live_counts.unread_bytes += len(data)
            self._tell_written(None)
            upstream.write(data)
            return
        self._conversation.now_s = time.time()
        held, self._held = self._held, b""
        send: list[bytes] = []
        tells = self._proxy.on_written is not None
        begin = done = 0  # of what is to be sent, and of the bytes that belong to complete commands
        for command in self._commands.feed(data):
            local = None if self._passed else self._judge(command[0])
            if tells and (keys := written((command[0][0] or b"").upper(), command[0])) != []:
                self._tell_written(keys)
            if local is None:
                send.append(held)
                self._conversation.commands([command])
            else:
                send.append(data[begin:done])
                begin = command[1]
                self._answer(local)
            held, done, self._passed = b"", command[1], False
        self._passed = self._passed or not self._may_be_lookup(len(held) + len(data) - done)
        if self._passed or self._commands.idle:
            send += (held, data[begin:])
        else:
            send.append(data[begin:done])
            self._held = held + data[done:]
        out = b"".join(send)
        if out:
            upstream.write(out)
        self._passed = self._passed and not self._commands.idle
        self._see_whether_broken()
        if self._conversation.lost:
            self._lose(self._conversation.lost)

    def upstream_received(self, data: bytes) -> None:
        """Hand on, with answers of the proxy's own between the upstream's."""
        if self._blind:
            super().upstream_received(data)
            return
        conversation = self._conversation
        conversation.now_s = time.time()
        self._looks += 1
        send: list[bytes] = []
        begin = 0
        for reply in self._replies.feed(data):
            conversation.reply(reply)
            if conversation.pending and isinstance(conversation.pending[0], Local):
                send += (data[begin : reply.end], self._own_answers())
                begin = reply.end
        send.append(data[begin:])
        if self._unproven != [] and conversation.admitted:
            keys, self._unproven = self._unproven, []
            self._tell_written(keys)
        self.transport.write(b"".join(send))
        if self._replies.broken:
            self._not_resp()
        elif conversation.lost:
            self._lose(conversation.lost)

    def pause_writing(self) -> None:
        """The client reads slowly: the proxy's own answers must not pile up either."""
        super().pause_writing()
        self.hold_reading("own answers")

    def resume_writing(self) -> None:
        """The client caught up."""
        super().resume_writing()
        self.release_reading("own answers")

    def _request_parser(self) -> RequestParser:
        if self._proxy.on_written is None:
            return super()._request_parser()
        return RequestParser(WANTED | WRITES, WORDS_MAX)

    def _tell_written(self, keys: list[bytes] | None) -> None:
        """Say which keys are being written, once the upstream has shown that it does what this client asks."""
        on_written = self._proxy.on_written
        if on_written is None:
            return
        if self._conversation.admitted:
            on_written(None if keys is None else [text_of(key) for key in keys])
        elif keys is None or self._unproven is None or len(self._unproven) + len(keys) > _UNPROVEN_MAX:
            self._unproven = None
        else:
            self._unproven += keys

    def _may_be_lookup(self, held_bytes: int) -> bool:
        name = self._commands.name
        return not self._commands.broken and held_bytes <= _HELD_BYTES_MAX and (not name or name in LOOKUPS)

    def _judge(self, args: list[bytes | None]) -> Local | None:
        """The proxy's own answer to a command; None where the upstream is to answer."""
        name = (args[0] or b"").upper()
        fewest, most = _ARGUMENTS.get(name, (1, 0))
        conversation = self._conversation
        if not (fewest <= len(args) <= most and conversation.admitted and conversation.answers_in_order):
            return None
        keys = args[1:] if name in {b"MGET", b"EXISTS"} else args[1:2]
        if None in keys:
            return None
        known = tuple(key for key in keys if key is not None)
        guard = self._proxy.guard
        assert guard is not None
        try:
            verdict_of = {key: guard(text_of(key)) for key in known}
        except Exception:  # a guard that fails must not stop traffic
            self._proxy.live_counts.guard_errors += 1
            return None
        verdicts = set(verdict_of.values())
        if "limit" in verdicts:
            self._proxy.live_counts.limit_answers += 1
            held_back = tuple(key for key in known if verdict_of[key] != "pass")
            return Local(held_back, name, len(args) - 1, _LIMITED)
        if verdicts == {"nil"}:
            self._proxy.live_counts.nil_answers += 1
            return Local(known, name, len(args) - (2 if name == b"HMGET" else 1))
        return None

    def _answer(self, local: Local) -> None:
        self._conversation.pending.append(local)
        if len(self._conversation.pending) == 1 and self._replies.idle:
            self.transport.write(self._own_answers())

    def _own_answers(self) -> bytes:
        conversation, answers = self._conversation, []
        pending = conversation.pending
        while pending and isinstance(local := pending[0], Local):
            pending.popleft()
            conversation.answered_locally(local)
            answers.append(local.reply(conversation.resp3))
        return b"".join(answers)

    def _lose(self, reason: str) -> None:
        stranded = any(isinstance(waiting, Local) for waiting in self._conversation.pending)
        super()._lose(reason)
        if stranded:
            self.refuse("commands and replies can no longer be matched, and a look-up was not sent; connect again")
        elif self._proxy.on_written is not None:
            if self._conversation.admitted:
                self._tell_written(None)
            else:  # what it writes from here on would never be told
                self.refuse("commands and replies can no longer be matched; connect again")
