from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from assemble.spools import T0, events, write
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeprof.profiler.assemble import small
from spikeprof.profiler.assemble.spool import ProcessSpool, read_process, read_processes


def _with(folder: Path, *more: dict[str, Any], **changes: Any) -> ProcessSpool:
    lines = events(**changes)
    return read_process(write(folder, lines=[*lines[:-2], *more, *lines[-2:]]))


def test_a_whole_life(tmp_path: Path) -> None:
    process = _with(
        tmp_path,
        {"ev": "names", "t": T0 + 200, "names": [[4096, "_Z4gemmv"], [8192, None]]},
        {"ev": "graph_nodes", "t": T0 + 210, "nodes": [[7, 0, 2, T0 + 205]]},
        {"ev": "steps", "t": T0 + 220, "steps": [["forward", True, T0 + 206, 5000]]},
        {"ev": "dropped", "t": T0 + 230, "records": 4},
        {"ev": "dropped", "t": T0 + 240, "records": 5},
        {"ev": "note", "t": T0 + 250, "text": "a note"},
        {"ev": "refused", "t": T0 + 255, "what": {"activity kind 22": "not here"}},
        {"ev": "fault", "t": T0 + 260, "where": "steps", "text": "ValueError: x"},
        {"ev": "of a later version", "t": T0 + 20_000, "something": [1]},
        rank="3",
    )
    assert (process.pid, process.parent_pid, process.argv) == (41, 40, ("python", "x.py"))
    assert (process.python, process.torch, process.env_rank) == ("3.12.3", "2.11.0", 3)
    assert (process.libcupti, process.libcupti_path, process.sizes) == (130001, "/lib/libcupti.so.13", {})
    assert (process.hello_ns, process.activated_ns, process.last_ns) == (T0, T0 + 100, T0 + 20_000)
    assert (process.finished, process.cost_ns, process.dropped) == (True, 10, 9)
    assert process.windows == [(T0 + 50, "traced", ""), (T0 + 10_000, "stopped", "the program ended")]
    assert process.names == {4096: "_Z4gemmv"}
    assert process.nodes == [(7, 0, 2, T0 + 205)]
    assert process.steps == [("forward", True, T0 + 206, 5000)]
    assert process.faults == ["steps: ValueError: x"]
    assert process.notes == ["a note", "activity kind 22 refused: not here"]
    assert process.damaged_lines == 0
    assert process.records == tmp_path / f"41-{T0}.act"


def test_a_name_that_is_read_again_is_the_newer_one(tmp_path: Path) -> None:
    process = _with(
        tmp_path, {"ev": "names", "t": T0, "names": [[1, "old"]]}, {"ev": "names", "t": T0, "names": [[1, "new"]]}
    )
    assert process.names == {1: "new"}


def test_a_name_is_text_whatever_was_written(tmp_path: Path) -> None:
    assert _with(tmp_path, {"ev": "names", "t": T0, "names": [[1, 5], [2, ["x"]]]}).names == {1: "5", 2: "['x']"}


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_last_line_that_is_cut_short_is_no_damage(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path)
    whole = read_process(path)
    path.write_bytes(path.read_bytes()[:-cut])
    process = read_process(path)
    assert process.damaged_lines == 0
    # Only the newline is missing: the line is whole. Else the farewell is lost.
    assert process.finished == (cut == 1)
    assert process.windows == whole.windows


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\xff\xfe garbage",
        b"[1, 2]",
        b'"text"',
        b"{}",
        b'{"ev": ["names"], "t": 1}',
        b'{"ev": "names", "t": 1, "names": 5}',
        b'{"ev": "names", "t": 1, "names": [[1]]}',
        b'{"ev": "names", "t": "soon", "names": []}',
        b'{"ev": "window", "t": 1}',
        b'{"ev": "hello", "t": 1}',
        b'{"ev": "refused", "t": 1, "what": "all"}',
        b'{"ev": "note"}',
        b'{"ev": "window", "t": 9223372036854775808, "state": "traced", "reason": ""}',
        b'{"ev": "graph_nodes", "t": 1, "nodes": [[7, 0, 1, 1], [7, 0, 2147483648, 1]]}',
        b'{"ev": "graph_nodes", "t": 1, "nodes": [[7, 0, 1, 1, 0, 0, 1], [7, 0, 1, 1, 9223372036854775808, 0, 1]]}',
        b'{"ev": "steps", "t": 1, "steps": [["forward", true, 1, 1], ["forward", true, 1, 1e300]]}',
        b'{"ev": "ranges", "t": 1, "ranges": [["step", "s", 1, 1, 1, {}], ["step", "s", -1, 1, 1, {}]], "dropped": 1}',
        b'{"ev": "ops", "t": 1, "ops": [["aten::mm", -9223372036854775808, 1, 7, [], []]]}',
        b'{"ev": "stacks", "t": 1, "stacks": [[3, [["x.py", 2147483648, "f"]]]]}',
        b'{"ev": "activated", "t": 1, "version": [1], "cost_ns": 0}',
        b'{"ev": "note", "t": 1e999}',
        b"[" * 100_000,
        b"",
    ],
)
def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(line + b"\n" + whole + line + b"\n")
    process = read_process(path)
    assert process.damaged_lines == 2
    assert (process.pid, process.activated_ns, process.finished) == (41, T0 + 100, True)
    assert (process.nodes, process.steps, process.ranges) == ([], [], [])  # nothing of such a line is kept
    assert (process.libcupti, len(process.windows)) == (130001, 2)
    assert not process.attribution.stacks
    assert not len(process.attribution.rows("ops")["start"])
    assert small.notes_of([process]) == ["2 line(s) of the event file of process 41 are damaged"]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 800))
def test_no_bytes_make_reading_fail(tmp_path_factory: pytest.TempPathFactory, garbage: bytes, at: int) -> None:
    path = write(tmp_path_factory.mktemp("spool"))
    data = path.read_bytes()
    path.write_bytes(data[:at] + garbage + data[at:])
    assert read_process(path).pid == 41  # by the file's name, should the first line be the damaged one


def test_a_process_whose_first_line_is_damaged_is_known_by_its_files_name(tmp_path: Path) -> None:
    path = write(tmp_path, f"77-{T0 + 5}", lines=events()[1:])
    process = read_process(path)
    assert (process.pid, process.hello_ns, process.activated_ns) == (77, T0 + 5, T0 + 100)


def test_unicode_names_and_arguments(tmp_path: Path) -> None:
    process = _with(
        tmp_path, {"ev": "names", "t": T0, "names": [[1, "größer<日本語> 🚀"]]}, argv=["python", "프로그램.py"]
    )
    assert process.names == {1: "größer<日本語> 🚀"}
    assert process.argv == ("python", "프로그램.py")


def test_arguments_that_no_encoding_explains(tmp_path: Path) -> None:
    """Python passes such bytes as half surrogate pairs; JSON keeps them, Parquet and msgspec do not."""
    process = _with(tmp_path, argv=["python", b"caf\xe9.py".decode("utf-8", "surrogateescape")])
    assert process.argv == ("python", "caf?.py")
    assert process.damaged_lines == 0


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (None, None),
        ("0", 0),
        ("12", 12),
        ("-1", None),
        ("", None),
        ("two", None),
        ("²", None),
        ("9" * 5000, None),
        (5, 5),
    ],
)
def test_rank_of_the_environment(tmp_path: Path, rank: object, expected: int | None) -> None:
    process = _with(tmp_path, rank=rank)
    assert process.env_rank == expected
    assert process.damaged_lines == 0


def test_a_folder_of_processes_in_order_of_their_start(tmp_path: Path) -> None:
    for pid, began in ((50, 300), (51, 100), (52, 200)):
        lines = events(pid=pid)
        lines[0]["t"] = T0 + began
        write(tmp_path, f"{pid}-{T0 + began}", lines=lines)
    (tmp_path / "session.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("foreign")
    assert [p.pid for p in read_processes(tmp_path)] == [51, 52, 50]


def test_an_empty_folder_and_empty_files(tmp_path: Path) -> None:
    assert read_processes(tmp_path) == []
    (tmp_path / "60-5.jsonl").write_bytes(b"")
    (process,) = read_processes(tmp_path)
    assert (process.pid, process.activated_ns, process.collected) == (60, 0, False)


def test_collected_means_that_recording_was_on(tmp_path: Path) -> None:
    lines = events()
    assert read_process(write(tmp_path, "1-1", frames=None, lines=lines)).collected
    lines[1] = {"ev": "window", "t": T0 + 50, "state": "off", "reason": "before cudaProfilerStart"}
    assert not read_process(write(tmp_path, "2-2", frames=None, lines=lines)).collected
    # Calls are recorded meanwhile; GPU work is not.
    assert not read_process(write(tmp_path, "3-3", frames=[b""], lines=lines)).collected
    assert read_process(write(tmp_path, "4-4", frames=[b""], lines=lines[:1])).collected


# -- ranks ------------------------------------------------------------------------------------------------


def _process(stem: str, pid: int, rank: int | None, *, traced: bool = True) -> ProcessSpool:
    return ProcessSpool(Path(stem), pid=pid, env_rank=rank, activated_ns=T0 if traced else 0)


def _ranks(*processes: ProcessSpool) -> list[int]:
    small.number(processes)
    return [p.rank for p in processes]


def test_ranks_are_the_launchers() -> None:
    assert _ranks(_process("a", 10, 1), _process("b", 11, 0)) == [1, 0]


def test_ranks_without_a_launcher_follow_the_start_with_traced_processes_first() -> None:
    shell = _process("a", 10, None, traced=False)
    assert _ranks(shell, _process("b", 11, None), _process("c", 12, None)) == [2, 0, 1]


def test_a_rank_that_workers_inherited_stays_with_the_first() -> None:
    worker = _process("c", 12, 1, traced=False)
    assert _ranks(_process("a", 10, 1), _process("b", 11, 1), worker, _process("d", 13, 0)) == [1, 2, 3, 0]


def test_an_execd_process_keeps_its_pid_and_is_still_two() -> None:
    assert _ranks(_process("10-1", 10, None, traced=False), _process("10-2", 10, None)) == [1, 0]
    assert sorted(_ranks(_process("10-1", 10, 0), _process("10-2", 10, 0))) == [0, 1]


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 6)), st.booleans()), max_size=12),
)
def test_ranks_are_unique_and_kept_where_they_can_be(processes: list[tuple[int | None, bool]]) -> None:
    made = [_process(str(i), 100, rank, traced=traced) for i, (rank, traced) in enumerate(processes)]
    ranks = _ranks(*made)
    assert len(set(ranks)) == len(ranks)
    for wanted in {p.env_rank for p in made if p.activated_ns and p.env_rank is not None}:
        assert next(p for p in made if p.activated_ns and p.env_rank == wanted).rank == wanted
