from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from collectors.pierce.live import free_port, rows
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.profiler.collectors.pierce.engine import EngineCounts, KvEvents, read_events, subscribe
from spikeprof.profiler.errors import UsageError


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """As an engine encodes it."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class MapStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """As newer engines encode it."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class MapBatch(msgspec.Struct, omit_defaults=True):
    ts: float
    events: list[Any]


def stored(*hashes: int | bytes, after: int | bytes | None = None, **more: Any) -> BlockStored:
    return BlockStored(list(hashes), after, [1, 2], 16, **more)


def told(events: KvEvents, *batch: Any, ts: float = 7.0) -> list[tuple[str, bool, str]]:
    found = events.feed(msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(ts, list(batch), 0))))
    assert found is None or set(found.ts_s.tolist()) == {ts}
    return [] if found is None else rows(found)


def test_stored_blocks_missed_and_a_second_follower_shows_a_hit() -> None:
    events = KvEvents()
    assert told(events, stored(1, 2, 3)) == [
        ("prefix/0000000000000001", False, ""),
        ("block/0000000000000002", False, ""),
        ("block/0000000000000003", False, ""),
    ]
    assert told(events, stored(4, after=3)) == [
        ("block/0000000000000004", False, "")
    ]  # decoding goes on: no look-up hit
    # Another prompt with the first two blocks of the first: block 2 was found.
    assert told(events, stored(-1, after=2)) == [
        ("block/0000000000000002", True, ""),
        ("block/ffffffffffffffff", False, ""),
    ]
    assert told(events, stored(9, after=1)) == [
        ("prefix/0000000000000001", True, ""),
        ("block/0000000000000009", False, ""),
    ]
    assert told(events, stored(1, 2, 3)) == []  # computed twice: they are there
    assert (events.counts.stored_blocks, events.counts.batches) == (6, 5)


def test_removed_and_cleared_blocks_are_gone() -> None:
    events = KvEvents()
    told(events, stored(1, 2), stored(3, after=1))
    assert told(events, BlockRemoved([2]), stored(2, after=1))[1:] == [("block/0000000000000002", False, "")]
    assert told(events, AllBlocksCleared(), stored(5, after=1)) == [("block/0000000000000005", False, "")]
    counts = events.counts
    assert (counts.removed_blocks, counts.clears, counts.broken) == (1, 1, 0)


def test_copies_to_other_media_are_no_look_ups() -> None:
    events = KvEvents()
    assert told(events, stored(1, medium="CPU"), BlockRemoved([1], medium="CPU")) == []
    assert told(events, stored(1, medium="GPU")) == [("prefix/0000000000000001", False, "")]
    assert told(events, BlockRemoved([1], medium="CPU"), stored(1)) == []


def test_long_hashes_adapters_and_maps() -> None:
    events = KvEvents()
    assert told(events, stored(b"\x01" * 32, lora_id=3)) == [("prefix/" + "01" * 32, False, "3")]
    batch = MapBatch(
        2.0, [MapStored([b"\x02"], b"\x01" * 32, [], 16, 3, "GPU", "adapter"), {"type": "AllBlocksCleared"}]
    )
    found = events.feed(msgspec.msgpack.decode(msgspec.msgpack.encode(batch)))
    assert found is not None
    assert rows(found) == [("block/02", False, "adapter")]


def test_memory_is_bounded() -> None:
    events = KvEvents(blocks_max=100)
    for number in range(1000):
        told(events, stored(number))
    assert (len(events._blocks), events.counts.forgotten_blocks) == (100, 900)


@pytest.mark.parametrize(
    "batch",
    [
        *(None, 7, [], [1.0], ["x", []], [1.0, 3], {"ts": 1}, [1.0, [["Unknown", 1]]], [1.0, [["BlockStored"]]]),
        *([1.0, [7]], [1.0, [["BlockStored", [[1]], None]]], [1.0, [["BlockStored", [1], {}]]]),
        [1.0, [["BlockRemoved", 3]]],
    ],
)
def test_what_is_no_batch_is_counted(batch: Any) -> None:
    events = KvEvents()
    assert events.feed(batch) is None
    assert events.counts.broken == 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["ts", "events", "type", "block_hashes"]), inner)
    ),
    max_leaves=15,
)


@given(st.lists(_JSON, max_size=4))
def test_no_structure_stops_the_reading(events: list[Any]) -> None:
    KvEvents().feed([1.0, events])
    KvEvents().feed({"ts": 2, "events": events})


def test_lines_of_json() -> None:
    lines = [
        json.dumps([1.5, [["BlockStored", [1, 2], None, [], 16, None]]]),
        "",
        "{broken",
        json.dumps({"ts": 2, "events": [{"type": "BlockStored", "block_hashes": ["ab"], "parent_block_hash": 2}]}),
    ]
    events = KvEvents()
    found = [row for one in read_events(io.BytesIO("\n".join(lines).encode()), events) for row in rows(one)]
    assert found == [
        ("prefix/0000000000000001", False, ""),
        ("block/0000000000000002", False, ""),
        ("block/ab", False, ""),
    ]
    assert (events.counts.batches, events.counts.broken) == (2, 1)


class Engine:
    """Publishes as an engine does, and replays."""

    def __init__(self) -> None:
        zmq = pytest.importorskip("zmq")
        self._context = zmq.Context()
        self.endpoint, self.replay_endpoint = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self._pub = self._context.socket(zmq.XPUB)  # XPUB tells when someone has subscribed
        self._pub.bind(self.endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay_endpoint)
        self.kept: dict[int, bytes] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._replay)
        self._thread.start()

    def _replay(self) -> None:
        while not self._end.is_set():
            if self._router.poll(20):
                client, empty, start = self._router.recv_multipart()
                for number, payload in sorted(self.kept.items()):
                    if number >= int.from_bytes(start, "big"):
                        self._router.send_multipart((client, empty, number.to_bytes(8, "big"), payload))
                self._router.send_multipart((client, empty, (-1).to_bytes(8, "big", signed=True), b""))

    def wait_for_subscriber(self) -> None:
        assert self._pub.poll(5000)
        self._pub.recv()

    def publish(self, number: int, payload: bytes, lost: bool = False, kept: bool = True) -> None:
        if kept:
            self.kept[number] = payload
        if not lost:
            self._pub.send_multipart((b"kv", number.to_bytes(8, "big"), payload))

    def send(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def close(self) -> None:
        self._end.set()
        self._thread.join(5)
        self._context.destroy(linger=0)


def payload(*hashes: int) -> bytes:
    return msgspec.msgpack.encode(EventBatch(1.0, [stored(one) for one in hashes]))


def wait_for(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 5
    while not done() and time.monotonic() < until:
        time.sleep(0.01)


def test_a_running_engine_with_lost_replayed_and_broken_messages() -> None:
    engine = Engine()
    counts, end, found = EngineCounts(), threading.Event(), []

    def listen() -> None:
        batches = subscribe(
            engine.endpoint, engine.replay_endpoint, KvEvents(counts), topic="kv", poll_s=0.02, stop=end.is_set
        )
        for batch in batches:
            found.extend([] if batch is None else [int(key.split("/")[1], 16) for key, _, _ in rows(batch)])

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        engine.wait_for_subscriber()
        engine.publish(5, payload(50, 51))
        engine.publish(6, payload(60), lost=True)
        engine.publish(7, payload(70), lost=True, kept=False)
        engine.publish(8, payload(80))
        engine.send(b"kv", b"short", b"")
        engine.publish(9, b"\xc1")
        wait_for(lambda: len(found) == 4)
        engine.publish(0, payload(50))  # restarted
        wait_for(lambda: len(found) == 5)
    finally:
        end.set()
        thread.join(5)
        engine.close()
    assert found == [50, 51, 60, 80, 50]
    assert (counts.replayed_batches, counts.missed_batches, counts.restarts, counts.broken) == (1, 1, 1, 2)


def test_an_endpoint_that_is_none() -> None:
    pytest.importorskip("zmq")
    with pytest.raises(UsageError, match="'5557' is no endpoint to connect to"):
        next(subscribe("5557"))


def test_without_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UsageError, match=r"need pyzmq.*spikeprof\[pierce\]"):
        next(subscribe("tcp://127.0.0.1:5557"))
