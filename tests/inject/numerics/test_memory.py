"""The ring: every record once, or counted as lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeprof.profiler.inject.numerics import memory, records
from spikeprof.profiler.inject.numerics.memory import LASTING_ROWS, PASSING_ROWS, RING_RECORDS, Memory, memory_for


def new() -> Memory:
    return Memory(torch, torch.device("cpu"), 4, 8, 16)


def write(ring: Memory, tickets: range) -> None:
    """What the device does; only the word that the reader looks at."""
    numbers = np.arange(tickets.start, tickets.stop)
    ring.ring.numpy()[numbers % RING_RECORDS, records.TICKET] = numbers + 1


def read(ring: Memory, all_of_it: bool = False) -> list[int]:
    found: list[int] = []
    ring.drain(lambda piece: found.extend(np.frombuffer(piece, np.int64).reshape(-1, 16)[:, 0].tolist()), all_of_it)
    return [word - 1 for word in found]


def test_records_are_handed_over_at_the_second_look_and_all_at_the_end() -> None:
    ring = new()
    write(ring, range(5))
    assert read(ring) == []  # they may still be under way
    write(ring, range(5, 7))
    assert read(ring) == [0, 1, 2, 3, 4]
    assert read(ring) == [5, 6]
    write(ring, range(7, 10))
    assert read(ring, all_of_it=True) == [7, 8, 9]
    assert read(ring, all_of_it=True) == []


def test_a_lapped_reader_goes_on_with_what_is_left() -> None:
    ring = new()
    write(ring, range(10))
    read(ring)
    write(ring, range(10, 3 * RING_RECORDS + 100))
    found = read(ring, all_of_it=True)
    assert found == list(range(found[0], 3 * RING_RECORDS + 100))
    assert RING_RECORDS // 2 < len(found) < RING_RECORDS  # some room is left to the writer


@given(st.lists(st.tuples(st.integers(0, 20_000), st.booleans()), max_size=12))
@settings(max_examples=60, deadline=None)
def test_each_record_comes_once_and_in_order(turns: list[tuple[int, bool]]) -> None:
    ring, there, found, kept_up = new(), 0, [], True
    for count, all_of_it in turns:
        kept_up &= there + count - (found[-1] + 1 if found else 0) <= RING_RECORDS
        write(ring, range(there, there + count))
        there += count
        found += read(ring, all_of_it)
    found += read(ring, all_of_it=True)
    assert found == sorted(set(found))
    assert not found or found[-1] == there - 1
    if kept_up:
        assert found == list(range(there))


def test_rows_go_round_when_their_scans_have_ended() -> None:
    ring = new()
    rows = [ring.reserve(64, lasting=False) for _ in range(PASSING_ROWS // 64)]
    assert rows == list(range(0, PASSING_ROWS, 64))
    assert ring.reserve(1, lasting=False) == -1  # none has ended
    ring.finished[0:63] = 1
    assert ring.reserve(64, lasting=False) == -1
    ring.finished[63] = 1
    assert ring.reserve(64, lasting=False) == 0


def test_rows_of_graphs_are_never_given_to_others() -> None:
    ring = new()
    assert ring.reserve(LASTING_ROWS - 1, lasting=True) == PASSING_ROWS
    assert ring.reserve(2, lasting=True) == -1
    assert ring.reserve(1, lasting=True) == PASSING_ROWS + LASTING_ROWS - 1
    assert ring.reserve(1, lasting=True) == -1
    assert ring.reserve(1, lasting=False) == 0


def test_the_host_memory_is_bounded() -> None:
    assert new().nbytes < 10 << 20
    assert memory.RING_RECORDS & (memory.RING_RECORDS - 1) == 0


def test_what_a_scanner_has_left_is_used_again_unless_something_may_still_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = new()
    monkeypatch.setattr(memory, "_kept", [first])
    device = torch.device("cpu")

    def asked() -> Memory:
        return memory_for(torch, device, 4, 8, 16)

    assert asked() is not first  # still in use
    write(first, range(7))
    first.idle = True
    assert asked() is first
    assert read(first, all_of_it=True) == []  # the records of the one before are not ours
    first.idle = True
    first.reserve(1, lasting=False)
    assert asked() is not first  # a scan is under way
    first.finished[:] = 1
    first.reserve(1, lasting=True)
    assert asked() is not first  # a graph writes into it
