"""The two ends of one proxied connection: bytes go from each to the other, a copy to the conversation.

``Client`` hands every chunk on first and looks into it later. ``GuardedClient`` must know a command before it is sent,
and places the proxy's own answers among the upstream's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from typing import TYPE_CHECKING, cast

from spikeprof.profiler.collectors.pierce.conversation import LOOKUPS, WANTED, Conversation, Local
from spikeprof.profiler.collectors.pierce.replies import ReplyParser, only_strings
from spikeprof.profiler.collectors.pierce.resp import ARGS_MAX, RequestParser, only_gets
from spikeprof.profiler.lookups import text_of

if TYPE_CHECKING:
    from spikeprof.profiler.collectors.pierce.proxy import Proxy

#: Bytes of one direction that are put together to be looked into at once.
_JOIN_BYTES_MAX = 64 * 1024
#: Bytes of an incomplete look-up that wait for the rest before the guard is asked; a longer one passes.
_HELD_BYTES_MAX = 64 * 1024
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


def _keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have the kernel notice a peer whose machine is gone."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class Client(asyncio.Protocol):
    """A client of the proxy, with the connection to the upstream that is its own."""

    transport: asyncio.Transport

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._upstream: asyncio.Transport | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        self._holds: set[str] = set()
        self._eof = False
        self._requests: deque[bytes] = deque()
        self._answers: deque[bytes] = deque()
        self._queued = False
        self._blind = False
        self._malformed = False
        self._answered_s = 0.0
        self._at_end = True
        self._gone = False

    # -- transport of the client -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Dial the upstream; what comes earlier waits."""
        self.transport = cast(asyncio.Transport, transport)  # other loops' transports are no subclass
        _keep_alive(transport)
        self._conversation: Conversation = self._proxy.opened(self)
        self._commands = RequestParser(WANTED)
        self._replies = ReplyParser()
        self._dial()

    def data_received(self, data: bytes) -> None:
        """Hand on, then copy."""
        upstream = self._upstream
        if upstream is None:
            self._wait_for_upstream(data)
            return
        upstream.write(data)
        if self._blind and not self._followable(data):
            self._proxy.live_counts.unread_bytes += len(data)
            return
        self._requests.append(data)
        if not self._queued:
            self._queued = True
            self._proxy.enqueue(self)

    def hold_reading(self, reason: str) -> None:
        """Read nothing from the client until every reason for it is gone."""
        self._holds.add(reason)
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def release_reading(self, reason: str) -> None:
        """One reason is gone."""
        self._holds.discard(reason)
        if not self._holds and not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """The client reads slowly: so does the proxy from the upstream."""
        if self._upstream is not None and not self._upstream.is_closing():
            self._upstream.pause_reading()

    def resume_writing(self) -> None:
        """The client caught up."""
        if self._upstream is not None and not self._upstream.is_closing():
            self._upstream.resume_reading()

    def eof_received(self) -> bool:
        """No more commands; replies may still come."""
        if self._upstream is None:
            self._eof = True
            return self._dialling is not None
        if self._upstream.can_write_eof():
            self._upstream.write_eof()
            return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._gone = True
        if self._dialling is not None:
            self._dialling.cancel()
        if self._upstream is not None:
            self._upstream.close()
        self._proxy.closed(self)

    # -- upstream ----------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        self._dialling = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        proxy, options = self._proxy, self._proxy.options
        name = None if options.upstream_tls is None else options.upstream_name or proxy.upstream.host
        try:
            async with asyncio.timeout(options.connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: _Upstream(self),
                    proxy.upstream.host,
                    proxy.upstream.port,
                    ssl=options.upstream_tls,
                    server_hostname=name,
                )
        except TimeoutError:
            self._unreachable(f"no connection within {options.connect_timeout_s:g} s")
        except (OSError, ssl.SSLError) as error:
            self._unreachable(error.strerror or type(error).__name__)
        finally:
            self._dialling = None

    def _unreachable(self, reason: str) -> None:
        """Tell a client that asked for something; one that has not asks again by its first command."""
        if self._early and not self._gone:
            self.refuse(f"cannot reach the upstream {self._proxy.upstream} ({reason}); connect again when it is back")

    def _wait_for_upstream(self, data: bytes) -> None:
        self._early.append(data)
        self.hold_reading("upstream not connected")
        if self._dialling is None:
            self._dial()

    def upstream_made(self, transport: asyncio.Transport) -> None:
        """The upstream is there: hand on what came earlier."""
        if self._gone:
            transport.close()
            return
        _keep_alive(transport)
        self._upstream = transport
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)
        if early:
            self.release_reading("upstream not connected")
        if self._eof:
            self.eof_received()

    def upstream_received(self, data: bytes) -> None:
        """Hand on, then copy."""
        self.transport.write(data)
        if self._blind:
            self._answered_s, self._at_end = time.monotonic(), data.endswith(b"\r\n")
            self._proxy.live_counts.unread_bytes += len(data)
            return
        self._answers.append(data)
        if not self._queued:
            self._queued = True
            self._proxy.enqueue(self)

    def upstream_lost(self) -> None:
        """The upstream has closed: tell a client that waits for a reply, unless it asked for the end."""
        if self._gone:
            return
        while not self.analyse(float("inf")):
            pass
        pending = [waiting for waiting in self._conversation.pending if not isinstance(waiting, Local)]
        asked = any(getattr(waiting, "name", b"") in {b"QUIT", b"SHUTDOWN"} for waiting in pending)
        if pending and not asked and self._replies.idle and not self._blind:
            self.refuse(
                f"the upstream {self._proxy.upstream} closed the connection before it answered; whether it carried "
                "out the command is not known; connect again"
            )
        else:
            self.transport.close()

    def refuse(self, reason: str) -> None:
        """End the connection with an error in Redis's form."""
        self._proxy.live_counts.refused += 1
        if not self.transport.is_closing():
            self.transport.write(f"-ERR spikeprof: {reason}\r\n".encode())
        self.transport.close()

    def abort(self) -> None:
        """End the connection as it is."""
        self.transport.abort()

    # -- analysis ----------------------------------------------------------------------------------------------------

    @property
    def unread_bytes(self) -> int:
        """Copies that wait to be looked into."""
        return sum(map(len, self._requests)) + sum(map(len, self._answers))

    def analyse(self, until_s: float) -> bool:
        """Look into copies until ``until_s`` on the clock of time.perf_counter; whether all were seen to.

        Commands come first: the reply to each came later than it.
        """
        self._conversation.now_s = time.time()
        for chunks, look in ((self._requests, self._look_at_commands), (self._answers, self._look_at_replies)):
            while chunks:
                data = _joined(chunks)
                if not self._blind:
                    look(data)
                if chunks and time.perf_counter() > until_s:
                    return False
        self._queued = False
        return True

    def _look_at_commands(self, data: bytes) -> None:
        commands, conversation = self._commands, self._conversation
        keys = only_gets(data) if commands.idle else None
        if not keys or not conversation.gets(keys):
            conversation.commands(commands.feed(data))
            self._see_whether_broken()
        if conversation.lost:
            self._lose(conversation.lost)

    def _see_whether_broken(self) -> None:
        """The upstream answers malformed commands itself, and closes; what came before them is still answered."""
        if self._commands.broken and not self._malformed:
            self._malformed = True
            self._proxy.live_counts.malformed += 1

    def _look_at_replies(self, data: bytes) -> None:
        replies, conversation = self._replies, self._conversation
        hits = only_strings(data) if replies.idle else None
        if not hits or not conversation.strings(hits):
            conversation.replies(replies.feed(data))
        if replies.broken:
            self._not_resp()
        elif conversation.lost:
            self._lose(conversation.lost)

    def _not_resp(self) -> None:
        self._proxy.live_counts.malformed += 1
        self._lose("malformed RESP from the upstream")
        self.refuse(f"the upstream {self._proxy.upstream} does not speak RESP: {self._replies.broken}")

    def _lose(self, reason: str) -> None:
        self._conversation.lose(reason)
        self._blind, self._at_end = True, False

    def give_up(self) -> None:
        """Cease to follow this connection: there is more to read than can be read in time."""
        self._proxy.live_counts.unread_bytes += self.unread_bytes
        self._requests.clear()
        self._answers.clear()
        self._lose("analysis is behind")

    def _followable(self, data: bytes) -> bool:
        """Whether the conversation can be taken up with these bytes: a command after a pause, all before answered.

        Not certain (a slow command may still be outstanding behind one that was answered): a reply of a type that
        its command cannot have ends it again.
        """
        quiet = self._at_end and time.monotonic() - self._answered_s >= self._proxy.options.quiet_s
        self._at_end = False
        unread = self._requests or self._answers
        if not quiet or unread or self._commands.broken or self._conversation.ended or not data.startswith(b"*"):
            return False
        self._commands, self._replies = RequestParser(WANTED), ReplyParser()
        self._conversation.resume()
        self._blind = False
        return True


class _Upstream(asyncio.Protocol):
    """The upstream's end."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.data_received = client.upstream_received  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client.upstream_made(cast(asyncio.Transport, transport))

    def pause_writing(self) -> None:
        self._client.hold_reading("upstream reads slowly")

    def resume_writing(self) -> None:
        self._client.release_reading("upstream reads slowly")

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.upstream_lost()


class GuardedClient(Client):
    """A client whose look-ups are shown to the guard before they are sent."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(proxy)
        self._held = b""
        self._passed = False

    def data_received(self, data: bytes) -> None:
        """Send what the guard lets pass; hold the beginning of a look-up until the rest of it is there."""
        upstream = self._upstream
        if upstream is None:
            self._wait_for_upstream(data)
            return
        if self._blind and not self._followable(data):
            self._proxy.live_counts.unread_bytes += len(data)
            upstream.write(data)
            return
        self._conversation.now_s = time.time()
        held, self._held = self._held, b""
        send: list[bytes] = []
        begin = done = 0  # of what is to be sent, and of the bytes that belong to complete commands
        for command in self._commands.feed(data):
            local = None if self._passed else self._judge(command[0])
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
        send: list[bytes] = []
        begin = 0
        for reply in self._replies.feed(data):
            conversation.reply(reply)
            if conversation.pending and isinstance(conversation.pending[0], Local):
                send += (data[begin : reply.end], self._own_answers())
                begin = reply.end
        send.append(data[begin:])
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
            verdicts = {guard(text_of(key)) for key in known}
        except Exception:  # a guard that fails must not stop traffic
            self._proxy.live_counts.guard_errors += 1
            return None
        if "limit" in verdicts:
            self._proxy.live_counts.limit_answers += 1
            return Local(known, name, len(args) - 1, _LIMITED)
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


def _joined(chunks: deque[bytes]) -> bytes:
    data = chunks.popleft()
    if not chunks or len(data) + len(chunks[0]) > _JOIN_BYTES_MAX:
        return data
    parts, size = [data], len(data)
    while chunks and size + len(chunks[0]) <= _JOIN_BYTES_MAX:
        parts.append(chunks.popleft())
        size += len(parts[-1])
    return b"".join(parts)
