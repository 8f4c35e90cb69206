"""Prefix-cache look-ups of an inference engine, from the KV-cache events that vLLM and SGLang publish.

A batch is ``[ts, [event, …], rank?]``, an event ``["BlockStored", block_hashes, parent_block_hash, token_ids,
block_size, lora_id, medium?, lora_name?, …]``, ``["BlockRemoved", block_hashes, medium?, …]`` or
``["AllBlocksCleared"]``; newer engines write both as maps of the same names with the tag under ``type``. They come as
msgpack over a ZeroMQ PUB socket (topic, sequence number of 8 bytes, batch), a ROUTER socket replays recent ones; or as
lines of JSON. Sources: vllm/distributed/kv_events.py and sglang/srt/disaggregation/kv_events.py.

What the events tell: a block that is stored was looked up and missed. What they do not tell: hits. A block that is
followed by a second, different block was found by the second request: that hit is certain; others are not seen, so
that the hits here are a lower bound. The engine's counters (prometheus.py) have all of them, without keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from spikeprof.profiler.errors import UsageError
from spikeprof.profiler.lookups import Lookups, lookups

#: The bytes of a batch at most; a longer message ends the connection, which ZeroMQ makes anew.
_MESSAGE_BYTES_MAX = 64 << 20
_END_OF_REPLAY = -1
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": ("block_hashes", "medium"), "AllBlocksCleared": ()}

_FOLLOWED, _ROOT = 1, 2


@dataclass(slots=True)
class EngineCounts:
    """What was read."""

    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    clears: int = 0
    broken: int = 0
    """Batches or events that are none, skipped."""
    missed_batches: int = 0
    """Lost between the engine and here, and not replayed either."""
    replayed_batches: int = 0
    restarts: int = 0
    """How often sequence numbers began anew: the engine had restarted."""
    forgotten_blocks: int = 0
    """Blocks left out of memory to bound it: a hit on one of them is not seen."""


class KvEvents:
    """Batches of events in their order; out come look-ups.

    Keys are ``prefix/HASH`` for the first block of a prompt, ``block/HASH`` for a later one; tenants are the names
    of LoRA adapters. ``blocks_max``: blocks remembered, some 200 bytes each. Only blocks in GPU memory count: a copy
    to another medium is no look-up.
    """

    def __init__(self, counts: EngineCounts | None = None, blocks_max: int = 262_144) -> None:
        self.counts = counts if counts is not None else EngineCounts()
        self._blocks_max = blocks_max
        self._blocks: dict[int | str | bytes, int] = {}

    def restart(self) -> None:
        """The engine has restarted: its cache is empty."""
        self.counts.restarts += 1
        self._blocks.clear()

    def feed(self, batch: Any) -> Lookups | None:
        """The look-ups that one decoded batch tells of; None without any."""
        parts = _batch(batch)
        if parts is None:
            self.counts.broken += 1
            return None
        self.counts.batches += 1
        ts_s, events = parts
        found: list[tuple[str, bool, str]] = []
        for event in events:
            named = _event(event)
            if named is None:
                self.counts.broken += 1
            elif named[0] == "BlockStored":
                self._stored(named[1], found)
            elif named[0] == "BlockRemoved":
                self._removed(named[1])
            else:
                self.counts.clears += 1
                self._blocks.clear()
        if not found:
            return None
        keys, hits, tenants = zip(*found, strict=True)
        return lookups([ts_s] * len(keys), keys, hits, tenants=tenants)

    def _stored(self, event: dict[str, Any], found: list[tuple[str, bool, str]]) -> None:
        if not _on_gpu(event):
            return
        lora = event.get("lora_name") or event.get("lora_id")
        tenant = "" if lora is None else str(lora)
        parent = event.get("parent_block_hash")
        blocks = self._blocks
        for block in event["block_hashes"]:
            if block not in blocks:
                self.counts.stored_blocks += 1
                self._follow(parent, found, tenant)
                kind = _ROOT if parent is None else 0
                blocks[block] = kind
                found.append((_key(block, kind), False, tenant))
            parent = block
        while len(blocks) > self._blocks_max:
            self.counts.forgotten_blocks += 1
            del blocks[next(iter(blocks))]

    def _follow(self, parent: Any, found: list[tuple[str, bool, str]], tenant: str) -> None:
        """A new block follows ``parent``: a hit on it where another one had followed it before."""
        kind = self._blocks.get(parent) if parent is not None else None
        if kind is None:
            return
        if kind & _FOLLOWED:
            found.append((_key(parent, kind), True, tenant))
        self._blocks[parent] = kind | _FOLLOWED

    def _removed(self, event: dict[str, Any]) -> None:
        if not _on_gpu(event):
            return
        for block in event["block_hashes"]:
            self.counts.removed_blocks += 1
            self._blocks.pop(block, None)


def read_events(stream: BinaryIO, events: KvEvents | None = None) -> Iterator[Lookups]:
    """Look-ups of batches written as lines of JSON; broken lines are counted and skipped."""
    yield from _found(events or KvEvents(), (line for line in stream if line.strip()), msgspec.json.decode)


def subscribe(
    endpoint: str,
    replay_endpoint: str | None = None,
    events: KvEvents | None = None,
    *,
    topic: str = "",
    poll_s: float = 0.1,
    replay_timeout_s: float = 1.0,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Lookups | None]:
    """Look-ups of a running engine: ``endpoint`` is its PUB socket (``tcp://127.0.0.1:5557``).

    Gives None where nothing came for ``poll_s`` seconds. Batches that were lost on the way are asked for at
    ``replay_endpoint``, where there is one; what it no longer has is counted. Raises UsageError without pyzmq, or where
    an endpoint is none.
    """
    zmq = _zmq()
    events = events or KvEvents()
    context = zmq.Context()
    try:
        socket = _connect(context, zmq.SUB, endpoint)
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        replay = None if replay_endpoint is None else _connect(context, zmq.DEALER, replay_endpoint)
        expected: int | None = None
        while not stop():
            if not socket.poll(poll_s * 1000):
                yield None
                continue
            frames = socket.recv_multipart()
            number = _number(frames[-2]) if len(frames) == 3 else None
            if number is None:
                events.counts.broken += 1
                continue
            if expected is not None and number < expected:
                events.restart()
            elif expected is not None and number > expected:
                recovered = _replay(replay, expected, number, replay_timeout_s) if replay is not None else []
                events.counts.missed_batches += number - expected - len(recovered)
                events.counts.replayed_batches += len(recovered)
                yield from _found(events, recovered)
            expected = number + 1
            yield from _found(events, [frames[-1]])
    finally:
        context.destroy(linger=0)


def _found(
    events: KvEvents, payloads: Iterable[bytes], decode: Callable[[bytes], Any] = msgspec.msgpack.decode
) -> Iterator[Lookups]:
    """Look-ups of encoded batches; broken ones are counted."""
    for payload in payloads:
        try:
            batch = decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            events.counts.broken += 1
            continue
        found = events.feed(batch)
        if found is not None:
            yield found


def _replay(socket: Any, first: int, end: int, timeout_s: float) -> list[bytes]:
    """The batches ``first`` … ``end`` - 1 that the engine still has, in their order."""
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    found: list[bytes] = []
    until_s = time.monotonic() + timeout_s
    while (left_s := until_s - time.monotonic()) > 0 and socket.poll(left_s * 1000):
        frames = socket.recv_multipart()
        number = _number(frames[-2]) if len(frames) >= 2 else None
        if number is None or number == _END_OF_REPLAY:
            break
        if first <= number < end:
            found.append(frames[-1])
    return found


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise UsageError(
            "an engine's events over ZeroMQ need pyzmq, which is not installed; events in a file of JSON lines do not. "
            "Install it: pip install 'spikeprof[pierce]'"
        ) from error
    return zmq


def _connect(context: Any, kind: int, endpoint: str) -> Any:
    zmq = _zmq()
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise UsageError(
            f"{endpoint!r} is no endpoint to connect to ({error}); give one like tcp://127.0.0.1:5557"
        ) from error
    return socket


def _number(frame: bytes) -> int | None:
    return int.from_bytes(frame, "big", signed=True) if len(frame) == 8 else None


def _batch(batch: Any) -> tuple[float, list[Any]] | None:
    if isinstance(batch, dict):
        batch = [batch.get("ts"), batch.get("events")]
    if not isinstance(batch, list) or len(batch) < 2:
        return None
    ts_s, events = batch[:2]
    return (float(ts_s), events) if isinstance(ts_s, int | float) and isinstance(events, list) else None


def _event(event: Any) -> tuple[str, dict[str, Any]] | None:
    """Tag and fields of an event in either form; None where it is none that is known."""
    if isinstance(event, list) and event and isinstance(event[0], str) and event[0] in _FIELDS:
        event = {"type": event[0], **dict(zip(_FIELDS[event[0]], event[1:], strict=False))}
    if not isinstance(event, dict) or not isinstance(event.get("type"), str) or event["type"] not in _FIELDS:
        return None
    hashes = event.get("block_hashes", [])
    needed = event["type"] != "AllBlocksCleared"
    if needed and not (isinstance(event.get("block_hashes"), list) and all(map(_is_hash, hashes))):
        return None
    parent = event.get("parent_block_hash")
    return (event["type"], event) if parent is None or _is_hash(parent) else None


def _is_hash(value: Any) -> bool:
    return isinstance(value, int | str | bytes)


def _on_gpu(event: dict[str, Any]) -> bool:
    return str(event.get("medium") or "GPU").upper() == "GPU"


def _key(block: int | str | bytes, kind: int) -> str:
    if isinstance(block, bytes):
        text = block.hex()
    else:
        text = f"{block & (1 << 64) - 1:016x}" if isinstance(block, int) else block
    return f"{'prefix' if kind & _ROOT else 'block'}/{text}"
