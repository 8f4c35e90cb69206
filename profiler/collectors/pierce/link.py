"""The two ends of one proxied connection: bytes go from each to the other at once, a copy to the conversation later."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from spikeprof.profiler.collectors.pierce.conversation import WANTED, Conversation, Local
from spikeprof.profiler.collectors.pierce.replies import ReplyParser, only_lines, only_strings
from spikeprof.profiler.collectors.pierce.resp import RequestParser, only_gets

if TYPE_CHECKING:
    from spikeprof.profiler.collectors.pierce.proxy import Proxy

#: Bytes of one direction that are put together to be looked into at once.
_JOIN_BYTES_MAX = 64 * 1024
#: Chunks from this size on may be the inside of a long string, of which no copy is needed.
_LARGE_BYTES = 32 * 1024
#: How long replies are waited for when a client has ended its side and the upstream cannot be told.
_GRACE_S = 5.0


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
        self._looks = 0
        self._stall = (0, 0.0)
        self._answered_s = 0.0
        self._at_end = True
        self._gone = False

    # -- transport of the client -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Dial the upstream; what comes earlier waits."""
        self.transport = cast(asyncio.Transport, transport)  # other loops' transports are no subclass
        _keep_alive(transport)
        self._conversation: Conversation = self._proxy.opened(self)
        self._commands = self._request_parser()
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
        if len(data) >= _LARGE_BYTES and not self._requests and self._commands.step_over(len(data)):
            return
        self._requests.append(data)
        self._enqueue(len(data))

    def hold_reading(self, reason: str) -> None:
        """Read nothing from the client until every reason for it is gone."""
        if not self._holds and not self.transport.is_closing():
            self.transport.pause_reading()
        self._holds.add(reason)

    def release_reading(self, reason: str) -> None:
        """One reason is gone."""
        if self._holds == {reason} and not self.transport.is_closing():
            self.transport.resume_reading()
        self._holds.discard(reason)

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
        else:  # TLS cannot say so: what was asked may still be answered
            asyncio.get_running_loop().call_later(_GRACE_S, self.transport.close)
        return True

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
        if len(data) >= _LARGE_BYTES and not self._answers and self._replies.step_over(len(data)):
            return
        self._answers.append(data)
        self._enqueue(len(data))

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

    def check_stall(self, now_s: float, timeout_s: float) -> None:
        """Refuse a client whose command the upstream has not begun to answer for so long (monotonic seconds)."""
        waits = self._conversation.waits_for_reply and not (self._requests or self._answers)
        if not waits or self._stall[0] != self._looks:
            self._stall = (self._looks, now_s)
        elif now_s - self._stall[1] >= timeout_s:
            self.refuse(f"no reply from the upstream {self._proxy.upstream} within {timeout_s:g} s; connect again")

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

    def _enqueue(self, size: int) -> None:
        if not self._queued:
            self._queued = True
            self._proxy.enqueue(self)
        if size >= _LARGE_BYTES:
            self._proxy.hurry()

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
                if self._blind:
                    self._proxy.live_counts.unread_bytes += len(data)
                else:
                    self._look(look, data)
                if chunks and time.perf_counter() > until_s:
                    return False
        self._queued = False
        return True

    def _look(self, look: Callable[[bytes], None], data: bytes) -> None:
        try:
            look(data)
        except Exception:  # a fault of ours costs one connection's look-ups, not its traffic
            self._proxy.live_counts.analysis_errors += 1
            self.give_up()

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
        self._looks += 1
        if not (replies.idle and self._all_alike(data)):
            conversation.replies(replies.feed(data))
        if replies.broken:
            self._not_resp()
        elif conversation.lost:
            self._lose(conversation.lost)

    def _all_alike(self, data: bytes) -> bool:
        """Whether these were replies of the common kinds only, and are dealt with."""
        if data.startswith((b"+", b":")):
            count = only_lines(data)
            return count > 0 and self._conversation.lines(count)
        hits = only_strings(data)
        return hits is not None and self._conversation.strings(hits)

    def _request_parser(self) -> RequestParser:
        return RequestParser(WANTED)

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
        self._commands, self._replies = self._request_parser(), ReplyParser()
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


def _joined(chunks: deque[bytes]) -> bytes:
    data = chunks.popleft()
    if not chunks or len(data) + len(chunks[0]) > _JOIN_BYTES_MAX:
        return data
    parts, size = [data], len(data)
    while chunks and size + len(chunks[0]) <= _JOIN_BYTES_MAX:
        parts.append(chunks.popleft())
        size += len(parts[-1])
    return b"".join(parts)
