"""A request pipe between two processes: tensors in shared memory, written in place and read as views, never copied.

    # one process                                 # another
    listener = Listener(slots=8, slot_bytes=1 << 20)
    ... hand listener.address over ...            end = await connect(address)
    end = await listener.accept()                 slot = await end.reserve((4, 128), torch.int64)
    message = await end.receive()                 slot.tensor.copy_(ids)  # or computed in place
    use(message.tensor); message.release()        slot.send(tag=7)

Each direction is a ring of ``slots`` slots. A slot goes free -> reserved -> sent -> received -> free; the state is one
byte that only one side may change at a time, and the sender takes slots in the ring's order: with none free,
``reserve`` waits (back-pressure). A socket carries nothing but wake-ups and the news that the other side is gone.
The data must be seen before the state that is written after them: x86 keeps that order.

The segment's name is unlinked as soon as both sides have mapped it: whoever is killed afterwards, the memory goes with
the last of the two processes; before that, multiprocessing's resource tracker takes care of it. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from numbers import Integral
from pathlib import Path

import torch
from torch import Tensor

from spikeprof.kernels.paths import check

_FREE, _RESERVED, _SENT, _RECEIVED, _DROPPED = range(5)
_MAX_DIMS = 8
_HEAD = struct.Struct(f"<qBB6x{_MAX_DIMS}q")  # tag, dtype, dimensions, shape
_HEAD_BYTES = 128  # the state's byte, then the head at 8; data behind it begin at a cache line
_HEAD_AT = 8
_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
           torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool)  # fmt: skip
_MOST = 1 << 63  # what the head's integers are below
_PEER = struct.Struct("3i")  # pid, uid, gid


class PeerGone(ConnectionError):
    """The other process closed its end, or died."""


@dataclass(frozen=True, slots=True)
class Address:
    """What the other process needs to connect; it can be pickled."""

    segment: str
    socket: str
    slots: int
    slot_bytes: int


@dataclass(slots=True)
class Slot:
    """Room for one tensor, reserved for writing: fill ``tensor``, then ``send`` or ``drop`` the slot, once."""

    tensor: Tensor
    _leave: Callable[[int, int], None]

    def send(self, tag: int = 0) -> None:
        """Hand the tensor over with a number of the caller's choice; it may not be written any more."""
        self._leave(_SENT, tag)

    def drop(self) -> None:
        """Send nothing after all: slots are received in the order of reserving, so that none may be left lying."""
        self._leave(_DROPPED, 0)


@dataclass(slots=True)
class Message:
    """A received tensor: a view of shared memory, valid until ``release``, which gives the slot back to the sender."""

    tensor: Tensor
    tag: int
    _release: Callable[[], None]

    def release(self) -> None:
        """Give the slot back; what was kept of ``tensor`` will be overwritten. Safe to repeat."""
        self._release()

    def __enter__(self) -> Message:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()


class Listener:
    """Makes the segment and waits for the one process that connects. Close it if none will."""

    def __init__(self, *, slots: int = 8, slot_bytes: int = 1 << 20) -> None:
        check(slots > 0, f"slots is {slots}: it must be positive")
        check(slot_bytes > 0, f"slot_bytes is {slot_bytes}: it must be positive")
        size = 2 * slots * _stride(slot_bytes)
        wanted = f"{slots} slots of {slot_bytes} bytes, twice, need {size} bytes of /dev/shm"
        there = os.statvfs("/dev/shm")
        if size > there.f_bavail * there.f_frsize:
            raise OSError(errno.ENOSPC, f"{wanted}: {there.f_bavail * there.f_frsize} are free")
        self._memory = SharedMemory(create=True, size=size)
        self._memory.close()  # mapped again in accept: SharedMemory would not let views outlive it
        try:
            # Else a full file system would be noticed by the first write to a page, which kills the process.
            with Path("/dev/shm", self._memory.name).open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            self._memory.unlink()
            raise OSError(error.errno, f"{wanted}: {error.strerror}") from None
        self._socket = socket.socket(socket.AF_UNIX)
        name = f"spikeprof-pipe-{secrets.token_hex(8)}"
        self._socket.bind(f"\0{name}")
        self._socket.listen(1)
        self._socket.setblocking(False)
        self.address = Address(self._memory.name, name, slots, slot_bytes)

    async def accept(self) -> End:
        """The end of the pipe, once the other process has connected. Processes of other users are turned away."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                peer, _ = await loop.sock_accept(self._socket)
                peer.setblocking(False)
                if _peer(peer)[1] == os.geteuid() and await loop.sock_recv(peer, 1):
                    break
                peer.close()
            return End(_mapped(self._memory.name), peer, self.address, side=0)
        finally:
            self.close()

    def close(self) -> None:
        """Unlink the segment's name and stop listening; done by ``accept``. Safe to repeat."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self._memory.unlink()


async def connect(address: Address) -> End:
    """The other end of a listener's pipe. Raises PeerGone where nobody listens any more."""
    loop = asyncio.get_running_loop()
    peer = socket.socket(socket.AF_UNIX)
    peer.setblocking(False)
    try:
        await loop.sock_connect(peer, f"\0{address.socket}")
        segment = _mapped(address.segment)
        await loop.sock_sendall(peer, b"\0")  # mapped: the name may go
    except (ConnectionError, FileNotFoundError) as error:
        peer.close()
        raise PeerGone(f"nobody listens at {address.socket}: {error}") from None
    return End(segment, peer, address, side=1)


class End:
    """One end of a pipe, for one event loop: ``reserve`` and ``send`` in one direction, ``receive`` in the other."""

    def __init__(self, segment: mmap.mmap, peer: socket.socket, address: Address, *, side: int) -> None:
        self._segment, self._peer, self._address = segment, peer, address
        self._stride = _stride(address.slot_bytes)
        ring = address.slots * self._stride
        self._out, self._in = side * ring, (1 - side) * ring
        self._out_next = self._in_next = 0
        self._is_gone = self._is_closed = False
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(peer.fileno(), self._on_readable)
        # The socket ends with the other process, unless a process that was forked meanwhile holds a copy of it.
        self._pidfd = -1
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(_peer(peer)[0])
            self._loop.add_reader(self._pidfd, self._on_gone)

    async def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """A slot to write a tensor of this shape into; waits while none is free.

        Raises ValueError for a shape, dtype or size that no slot can hold, PeerGone when the other side is gone.
        """
        kind = _DTYPES.index(dtype) if dtype in _DTYPES else -1
        check(kind >= 0, f"dtype is {dtype}: a pipe takes {', '.join(str(known) for known in _DTYPES)}")
        check(len(shape) <= _MAX_DIMS, f"shape has {len(shape)} dimensions: a pipe takes at most {_MAX_DIMS}")
        check(all(isinstance(size, Integral) and 0 <= size < _MOST for size in shape),
              f"shape is {list(shape)}: sizes must be whole numbers, 0 or more")  # fmt: skip
        need = math.prod(shape) * dtype.itemsize
        check(need <= self._address.slot_bytes, f"shape {list(shape)} of {dtype} needs {need} bytes: a slot has "
              f"{self._address.slot_bytes}")  # fmt: skip
        await self._until(lambda: not self._is_gone and self._segment[self._out_at] == _FREE)
        if self._is_gone:
            raise PeerGone("the other side is gone: nobody would read it")
        at = self._out_at
        self._out_next = (self._out_next + 1) % self._address.slots
        self._segment[at] = _RESERVED

        sizes = (*shape, *[0] * (_MAX_DIMS - len(shape)))
        is_left = False

        def leave(state: int, tag: int) -> None:
            nonlocal is_left
            check(not is_left, "the slot was sent or dropped already")
            check(isinstance(tag, Integral) and -_MOST <= tag < _MOST, f"tag is {tag!r}: it must be an int of 64 bits")
            if self._is_closed:
                raise PeerGone("this end was closed")
            is_left = True
            _HEAD.pack_into(self._segment, at + _HEAD_AT, tag, kind, len(shape), *sizes)
            self._hand_over(at, state)

        return Slot(self._view(at, shape, dtype), leave)

    async def send(self, tensor: Tensor, tag: int = 0) -> None:
        """Copy a tensor into a slot and send it: for what is not made in place."""
        slot = await self.reserve(tuple(tensor.shape), tensor.dtype)
        try:
            slot.tensor.copy_(tensor)
            slot.send(tag)
        except PeerGone:
            raise
        except BaseException:
            slot.drop()
            raise

    async def receive(self) -> Message:
        """The next message, in the order of reserving. What was sent before the other side went is still received.

        Raises PeerGone when nothing more can come.
        """
        while True:
            await self._until(lambda: self._segment[self._in_at] in (_SENT, _DROPPED))
            at, state = self._in_at, self._segment[self._in_at]
            if state not in (_SENT, _DROPPED):
                raise PeerGone("the other side is gone, and all that it sent was received")
            self._in_next = (self._in_next + 1) % self._address.slots
            if state == _SENT:
                break
            self._hand_over(at, _FREE)
        self._segment[at] = _RECEIVED
        tag, kind, dims, *shape = _HEAD.unpack_from(self._segment, at + _HEAD_AT)
        is_released = False

        def release() -> None:
            nonlocal is_released
            if not self._is_closed and not is_released:
                is_released = True
                self._hand_over(at, _FREE)

        return Message(self._view(at, tuple(shape[:dims]), _DTYPES[kind]), tag, release)

    def close(self) -> None:
        """Leave: the other side's waits end with PeerGone. Views of this side stay readable. Safe to repeat."""
        if self._is_closed:
            return
        self._on_gone()
        self._is_closed = True
        self._peer.close()
        del self._segment  # not closed: views keep the mapping as long as they live

    async def __aenter__(self) -> End:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def _out_at(self) -> int:
        return self._out + self._out_next * self._stride

    @property
    def _in_at(self) -> int:
        return self._in + self._in_next * self._stride

    def _view(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._segment, dtype=dtype, count=count, offset=at + _HEAD_BYTES).view(shape)

    def _hand_over(self, at: int, state: int) -> None:
        """Change a slot's state for the other side, after all that was written before, and wake it."""
        self._segment[at] = state
        # A full socket has wake-ups enough; a broken one is noticed by whoever waits.
        with contextlib.suppress(BlockingIOError, OSError):
            self._peer.send(b"\0")

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until the condition holds or the other side is gone."""
        while True:
            if self._is_closed:
                raise PeerGone("this end was closed")
            if is_so() or self._is_gone:
                return
            self._changed.clear()
            await self._changed.wait()

    def _on_readable(self) -> None:
        try:
            if not self._peer.recv(4096):
                self._on_gone()
        except BlockingIOError:
            pass
        except OSError:
            self._on_gone()
        self._changed.set()

    def _on_gone(self) -> None:
        """Stop watching, and let all that wait see for themselves."""
        if not self._is_gone:
            self._is_gone = True
            self._loop.remove_reader(self._peer.fileno())
            if self._pidfd >= 0:
                self._loop.remove_reader(self._pidfd)
                os.close(self._pidfd)
        self._changed.set()


def _stride(slot_bytes: int) -> int:
    return _HEAD_BYTES + -(-slot_bytes // 64) * 64


def _mapped(segment: str) -> mmap.mmap:
    """The segment mapped for reading and writing, without taking part in the ownership of its name."""
    with Path("/dev/shm", segment).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _peer(connected: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end."""
    pid, uid, gid = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid, gid
