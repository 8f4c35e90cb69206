from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spikeprof.profiler.collectors.pierce import jsonl
from spikeprof.profiler.collectors.pierce.jsonl import Counts, follow, read_jsonl
from spikeprof.profiler.errors import InputError
from spikeprof.profiler.lookups import Lookups

Row = tuple[float, str, bool, float | None, str]


def rows(batches: Iterator[Lookups]) -> list[Row]:
    return [
        (ts, key, hit, None if math.isnan(ttl) else ttl, tenant)
        for one in batches
        for ts, key, hit, ttl, tenant in zip(
            one.ts_s.tolist(),
            one.keys.to_pylist(),
            one.hits.tolist(),
            one.ttls_s.tolist(),
            one.tenants.to_pylist(),
            strict=True,
        )
    ]


def line(ts: float, key: str, hit: bool = False, **more: object) -> bytes:
    return json.dumps({"ts": ts, "key": key, "hit": hit, **more}).encode() + b"\n"


def test_members_that_are_missing_and_members_that_are_more() -> None:
    data = (
        line(1, "a", True, ttl=30, tenant="x") + line(2.5, "b", pod="p7") + b'{"hit":false,"key":"c","ts":3,"ttl":null}'
    )
    counts = Counts()
    assert rows(read_jsonl(io.BytesIO(data), counts)) == [
        (1, "a", True, 30, "x"),
        (2.5, "b", False, None, ""),
        (3, "c", False, None, ""),
    ]
    assert (counts.lines, counts.broken) == (3, 0)


@pytest.mark.parametrize(
    "broken",
    [
        *(b"{", b"nothing", b"[1]", b'"x"', b"7", b"null", b"{}", b'{"ts":1,"key":"a"}', b'{"ts":1,"hit":true}'),
        *(b'{"key":"a","hit":true}', b'{"ts":"1","key":"a","hit":true}', b'{"ts":1,"key":7,"hit":true}'),
        *(b'{"ts":1,"key":"a","hit":"yes"}', b'{"ts":1,"key":null,"hit":true}', b'{"ts":1e999,"key":"a","hit":true}'),
        *(
            b'{"ts":NaN,"key":"a","hit":true}',
            b'{"ts":1,"key":"\xff","hit":true}',
            b'{"ts":1,"key":"a","hit":true,"ttl":"x"}',
        ),
        *(b'{"ts":1,"key":"a","hit":true} {}', b"\x00\x00", b'{"ts":1,"key":"a","hit":true,"tenant":5}'),
    ],
)
def test_broken_lines_are_counted_and_the_others_read(broken: bytes) -> None:
    counts = Counts()
    found = rows(read_jsonl(io.BytesIO(line(1, "a") + broken + b"\n\r\n" + line(2, "b")), counts))
    assert [key for _, key, *_ in found] == ["a", "b"]
    assert (counts.lines, counts.broken) == (2, 1)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 2e9),
            st.text(max_size=10).filter(lambda text: text.isprintable()),
            st.booleans(),
            st.none() | st.floats(0, 1e6),
            st.sampled_from(["", "x", "ü"]),
        ),
        max_size=20,
    ),
    st.integers(1, 60),
)
def test_lines_read_in_any_pieces(wanted: list[Row], size: int) -> None:
    data = b"".join(
        json.dumps({"ts": ts, "key": key, "hit": hit, "ttl": ttl, "tenant": tenant}, ensure_ascii=False).encode()
        + b"\n"
        for ts, key, hit, ttl, tenant in wanted
    )

    class Pieces(io.BytesIO):
        def read1(self, _: int | None = -1) -> bytes:
            return self.read(size)

    assert rows(read_jsonl(Pieces(data))) == wanted


@given(st.binary(max_size=400))
def test_no_bytes_stop_the_reading(data: bytes) -> None:
    counts = Counts()
    found = rows(read_jsonl(io.BytesIO(data + b"\n" + line(1, "end")), counts))
    assert found[-1][1] == "end"


def test_a_line_without_end_is_not_held() -> None:
    data = line(1, "a") + b'{"key":"' + b"x" * (3 * jsonl.LINE_BYTES_MAX) + b'"}\n' + line(2, "b")

    class Pieces(io.BytesIO):
        def read1(self, _: int | None = -1) -> bytes:
            return self.read(100_000)

    counts = Counts()
    assert [key for _, key, *_ in rows(read_jsonl(Pieces(data), counts))] == ["a", "b"]
    assert counts.broken == 1


def test_late_events_are_counted() -> None:
    counts = Counts(late_s=5)
    times = [10, 20, 15, 14.9, 21, 3]  # 15 is 5 s late: not more; 14.9 and 3 are
    list(read_jsonl(io.BytesIO(b"".join(line(ts, "k") for ts in times)), counts))
    assert (counts.late, counts.latest_s) == (2, 21)


def test_a_stream_that_fails() -> None:
    class Failing(io.BytesIO):
        def read1(self, _: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(InputError, match=r"\(Input/output error\) after 0 lines"):
        list(read_jsonl(Failing()))


def test_standard_input_of_a_real_process() -> None:
    program = (
        "import sys; from spikeprof.profiler.collectors.pierce.jsonl import read_jsonl\n"
        "for batch in read_jsonl(sys.stdin.buffer): print(batch.keys.to_pylist(), flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(line(1, "a") + line(2, "b")[:10])
        child.stdin.flush()
        assert child.stdout.readline() == b"['a']\n"  # before the stream ends
        child.stdin.write(line(2, "b")[10:])
        child.stdin.close()
        assert child.stdout.readline() == b"['b']\n"


class Following:
    """``follow`` in a thread."""

    def __init__(self, path: Path, **options: bool) -> None:
        self.counts = Counts()
        self.keys: list[str] = []
        self._end = False
        self._batches = follow(path, self.counts, poll_s=0.01, stop=lambda: self._end, **options)
        self._idle = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.wait_idle()

    def _run(self) -> None:
        for batch in self._batches:
            if batch is None:
                self._idle += 1
            else:
                self.keys += batch.keys.to_pylist()

    def wait_idle(self) -> None:
        """Until everything that is there now was read."""
        before, until = self._idle, time.monotonic() + 5
        while self._idle < before + 2 and time.monotonic() < until:
            time.sleep(0.005)

    def stop(self) -> list[str]:
        self.wait_idle()
        self._end = True
        self._thread.join(5)
        return self.keys


def test_what_is_appended_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line(1, "before"))
    following = Following(path)
    with path.open("ab") as stream:
        stream.write(line(2, "a") + line(3, "b")[:7])
        stream.flush()
        following.wait_idle()
        assert following.keys == ["a"]
        stream.write(line(3, "b")[7:])
    assert following.stop() == ["a", "b"]
    assert following.counts.broken == 0


def test_a_rotated_file_is_read_to_its_end_and_the_new_one_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line(1, "a"))
    following = Following(path, from_start=True)
    with path.open("ab") as stream:
        path.rename(tmp_path / "events.jsonl.1")
        stream.write(line(2, "b"))
        stream.flush()
        following.wait_idle()
        stream.write(line(3, "c")[:-1])  # the writer has not noticed yet; no line end
    fresh = tmp_path / "fresh"
    fresh.write_bytes(line(4, "d"))
    fresh.rename(path)
    assert following.stop() == ["a", "b", "c", "d"]
    assert following.counts.rotations == 1


def test_a_cut_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line(1, "a") * 3 + b'{"ts":')
    following = Following(path, from_start=True)
    os.truncate(path, 0)
    following.wait_idle()
    with path.open("ab") as stream:
        stream.write(line(2, "b"))
    assert following.stop() == ["a", "a", "a", "b"]
    assert (following.counts.rotations, following.counts.broken) == (1, 0)


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    following = Following(tmp_path / "events.jsonl")
    (tmp_path / "events.jsonl").write_bytes(line(1, "a"))
    assert following.stop() == ["a"]


def test_a_folder_cannot_be_followed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be followed"):
        next(follow(tmp_path))
