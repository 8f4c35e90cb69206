"""The trace folder on disk: what is written comes back, and what is damaged hides nothing else."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from spikeprof.profiler import store
from spikeprof.profiler.errors import (
    DamagedTrace,
    ForeignFile,
    InputError,
    MissingTable,
    NewerSchema,
    OutputError,
    TraceNotFound,
)
from spikeprof.profiler.schema import SCHEMA_VERSION, TABLES
from spikeprof.profiler.trace import CollectorNote, Manifest, Trace

KERNELS = [{"start_ns": 10 * i, "end_ns": 10 * i + 5, "name": f"kernel {i % 3}"} for i in range(9)]
CALLS = [{"start_ns": 3, "end_ns": 4, "name": "cudaLaunchKernel"}]


def _trace() -> Trace:
    return tiny.trace(kernels=KERNELS, runtime_calls=CALLS, memory_ops=[])


def _written(folder: Path, trace: Trace | None = None) -> Path:
    path = store.create_folder(folder / "trace")
    store.write_trace(path, trace or _trace())
    return path


# -- round trips ------------------------------------------------------------------------------------------


def test_a_name_that_is_no_text_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    name = tmp_path / os.fsdecode(b"t\xfe")
    with pytest.raises(OutputError, match="no text in UTF-8"):
        store.create_folder(name)
    assert not name.exists()
    _written(tmp_path, _trace()).rename(name)
    with pytest.raises(InputError, match="rename it"):
        store.read_trace(name)


def test_tables_and_manifest_come_back(tmp_path: Path) -> None:
    trace = _trace()
    back = store.read_trace(_written(tmp_path, trace))
    assert back.manifest == trace.manifest
    assert set(back.tables) == {"kernels", "runtime_calls", "memory_ops"}
    assert not back.damaged
    for name in back.tables:
        assert back.table(name).schema == TABLES[name].arrow
        assert back.table(name).to_pylist() == trace.table(name).to_pylist()


def test_an_empty_table_comes_back_empty_and_an_absent_one_absent(tmp_path: Path) -> None:
    back = store.read_trace(_written(tmp_path))
    assert back.table("memory_ops").num_rows == 0
    assert "syncs" not in back
    with pytest.raises(MissingTable, match="no table 'syncs'"):
        back.table("syncs")


def test_every_table_of_the_schema_comes_back(tmp_path: Path) -> None:
    """One row each, with the largest value that its type holds."""
    path = store.create_folder(tmp_path / "trace")
    rows: dict[str, dict[str, Any]] = {}
    for name, spec in TABLES.items():
        rows[name] = {column.name: _largest(column.type) for column in spec.columns}
        arrays = [
            pa.array([value], pa.string()).dictionary_encode().cast(column.type)
            if pa.types.is_dictionary(column.type)
            else pa.array([value], column.type)
            for column, value in zip(spec.columns, rows[name].values(), strict=True)
        ]
        store.write_table(path, name, pa.Table.from_arrays(arrays, schema=spec.arrow))
    store.write_manifest(path, Manifest("spikeprof", 0, 1))
    back = store.read_trace(path)
    assert {name: back.table(name).to_pylist() for name in TABLES} == {name: [row] for name, row in rows.items()}


def _largest(kind: pa.DataType) -> Any:
    if pa.types.is_integer(kind):
        return 2 ** (kind.bit_width - 1) - 1
    if pa.types.is_floating(kind):
        return 1.7976931348623157e308
    return True if pa.types.is_boolean(kind) else "größe 🚀 \x00 <b>"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1), st.text(max_size=8)),
        max_size=40,
    )
)
def test_any_times_ids_and_names_come_back(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    """Delta encoding must survive differences that overflow."""
    names = [name.encode("utf-8", "replace").decode() for _, _, name in values]
    rows = [
        {"start_ns": t, "end_ns": t, "correlation_id": c, "name": name}
        for (t, c, _), name in zip(values, names, strict=True)
    ]
    path = _written(tmp_path_factory.mktemp("x"), tiny.trace(kernels=rows))
    back = store.read_trace(path).table("kernels")
    assert back.column("start_ns").to_pylist() == [t for t, _, _ in values]
    assert back.column("correlation_id").to_pylist() == [c for _, c, _ in values]
    assert back.column("name").to_pylist() == names


def test_many_row_groups_with_different_dictionaries(tmp_path: Path) -> None:
    path = store.create_folder(tmp_path / "trace")
    with store.open_table(path, "kernels") as writer:
        for i in range(5):
            writer.write_table(tiny.table("kernels", [{"start_ns": i, "name": f"kernel {i}"}, {"name": "common"}]))
    store.write_manifest(path, Manifest("spikeprof", 0, 1))
    back = store.read_trace(path)
    codes, labels = back.codes("kernels", "name")
    assert [labels[code] for code in codes] == [n for i in range(5) for n in (f"kernel {i}", "common")]
    assert len(labels) == 6


def test_columns_of_a_later_version_are_ignored_and_column_order_is_free(tmp_path: Path) -> None:
    path = _written(tmp_path)
    table = tiny.table("kernels", KERNELS)
    shuffled = table.select(table.column_names[::-1]).append_column("colour", pa.array(["red"] * len(KERNELS)))
    pq.write_table(shuffled, path / "kernels.parquet")
    assert store.read_trace(path).table("kernels").to_pylist() == table.to_pylist()


def test_pandas_reads_the_files(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(_written(tmp_path) / "kernels.parquet")
    assert list(frame.columns) == TABLES["kernels"].arrow.names
    assert frame["end_ns"].sub(frame["start_ns"]).tolist() == [5] * 9


def test_bytes_per_row(tmp_path: Path) -> None:
    """Steps of 385 kernels launched one by one, as decoding does: the file must stay small."""
    random = np.random.default_rng(1)
    count, step = 385 * 300, 385
    place = np.arange(count) % step
    start = np.cumsum(11_000 + random.gamma(3.0, 900.0, count)).astype(np.int64)
    columns: dict[str, Any] = dict.fromkeys(TABLES["kernels"].arrow.names, 0) | {
        "kernel_id": np.arange(count),
        "correlation_id": np.cumsum(random.choice([2, 10, 12, 15], step)[place]),
        "start_ns": start,
        "end_ns": start + 32 * random.integers(26, 400, count),
        "grid_x": random.integers(1, 4096, step)[place],
    }
    arrays = []
    for field in TABLES["kernels"].arrow:
        values = np.broadcast_to(np.asarray(columns[field.name]), count)
        if pa.types.is_dictionary(field.type):
            names = pa.array([f"kernel {i}" for i in range(30)])
            arrays.append(pa.DictionaryArray.from_arrays(pa.array((place % 30).astype(np.int32)), names))
        else:
            arrays.append(pa.array(values).cast(field.type))
    folder = store.create_folder(tmp_path / "trace")
    size = store.write_table(folder, "kernels", pa.Table.from_arrays(arrays, schema=TABLES["kernels"].arrow))
    assert size == (folder / "kernels.parquet").stat().st_size
    assert size / count < 8


# -- who may read it --------------------------------------------------------------------------------------


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        path = _written(tmp_path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert set(modes) == {"manifest.json", "kernels.parquet", "runtime_calls.parquet", "memory_ops.parquet"}
    assert set(modes.values()) == {0o600}


# -- damage -----------------------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _overwrite(path: Path) -> None:
    path.write_bytes(b"this is no Parquet file at all, it is a letter" * 20)


def _replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _lose_a_column(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["end_ns"]), path)


@pytest.mark.parametrize("damage", [_truncate, _empty, _overwrite, _replace_by_a_folder, _lose_a_column])
def test_a_damaged_table_is_named_and_the_others_stay_readable(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = _written(tmp_path)
    damage(path / "kernels.parquet")
    back = store.read_trace(path)
    assert set(back.damaged) == {"kernels"}
    assert "kernels.parquet" in back.damaged["kernels"]
    assert set(back.tables) == {"runtime_calls", "memory_ops"}
    assert back.table("runtime_calls").num_rows == 1
    with pytest.raises(MissingTable, match=r"kernels\.parquet"):
        back.table("kernels")


def test_a_single_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Anywhere in the data: pages carry checksums. A number that is wrong must not be read as if it were right."""
    path = _written(tmp_path)
    file = path / "kernels.parquet"
    whole = file.read_bytes()
    expected = store.read_trace(path).table("kernels").to_pylist()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    errors = []
    for at in range(4, footer, 5):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        file.write_bytes(data)
        back = store.read_trace(path)
        try:
            # A page's header may hold what nobody needs.
            assert back.table("kernels").to_pylist() == expected
        except DamagedTrace as error:
            errors.append(str(error))
        assert back.table("runtime_calls").num_rows == 1
    assert len(errors) > 100
    assert all("kernels.parquet is damaged: " in text for text in errors)
    assert all("the other tables can be read" in text for text in errors)


def test_a_column_of_a_foreign_type_is_damage(tmp_path: Path) -> None:
    path = _written(tmp_path)
    table = tiny.table("kernels", KERNELS)
    index = table.column_names.index("start_ns")
    texts = pa.array(["soon"] * len(KERNELS))
    pq.write_table(table.set_column(index, "start_ns", texts), path / "kernels.parquet")
    with pytest.raises(DamagedTrace, match="kernels"):
        store.read_trace(path).table("kernels")


def test_a_column_whose_name_is_no_text_is_damage(tmp_path: Path) -> None:
    path = _written(tmp_path)
    file = path / "kernels.parquet"
    file.write_bytes(file.read_bytes().replace(b"start_ns", b"start_n\x80"))
    back = store.read_trace(path)
    assert "kernels" not in back
    assert "kernels.parquet is damaged" in back.damaged["kernels"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_raises_anything_but_our_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any one file changed or cut anywhere: the trace opens, or says so; tables read, or say so."""
    path = _written(tmp_path_factory.mktemp("x"))
    file = path / data.draw(st.sampled_from(sorted(p.name for p in path.iterdir())))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    else:
        del content[at:]
    file.write_bytes(content)
    try:
        back = store.read_trace(path)
    except InputError:
        assert file.name == "manifest.json"
        return
    for name in back.tables:
        try:
            back.table(name)
        except DamagedTrace:
            assert file.name == f"{name}.parquet"


# -- the manifest -----------------------------------------------------------------------------------------


def _rewrite(path: Path, **changes: Any) -> None:
    content = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(content | changes))


def test_a_whole_manifest_comes_back(tmp_path: Path) -> None:
    note = CollectorNote("degraded", "why", 5, 4, 3, 2, {"no time": 2}, 99)
    manifest = Manifest(
        source="spikeprof",
        t0_unix_ns=1_790_000_000_123_456_789,
        duration_ns=2**62,
        command=("python", "größe <b>.py", ""),
        exit_code=-9,
        host="host",
        versions={"libcupti": "130001"},
        collectors={"activity": note},
        options={"window": "0.1,0.9"},
        notes=("a note",),
    )
    path = store.create_folder(tmp_path / "trace")
    store.write_manifest(path, manifest)
    assert store.read_trace(path).manifest == manifest


def test_a_newer_schema_is_refused_whatever_else_it_says(tmp_path: Path) -> None:
    path = _written(tmp_path)
    _rewrite(path, schema_version=SCHEMA_VERSION + 1, manifest="of a form not known yet")
    with pytest.raises(NewerSchema, match=f"schema {SCHEMA_VERSION + 1}, this spikeprof reads up to {SCHEMA_VERSION}"):
        store.read_trace(path)


def test_a_foreign_manifest_is_refused(tmp_path: Path) -> None:
    path = _written(tmp_path)
    _rewrite(path, format="somebody-elses")
    with pytest.raises(ForeignFile, match="somebody-elses"):
        store.read_trace(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": "spikeprof-trace"}', b"[" * 100_000])
def test_a_manifest_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    path = _written(tmp_path)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedTrace, match=r"manifest\.json"):
        store.read_trace(path)


def test_a_truncated_manifest(tmp_path: Path) -> None:
    path = _written(tmp_path)
    whole = (path / "manifest.json").read_bytes()
    for length in range(0, len(whole.rstrip()), 7):
        (path / "manifest.json").write_bytes(whole[:length])
        with pytest.raises(DamagedTrace):
            store.read_trace(path)


def test_a_manifest_of_the_right_form_with_wrong_contents(tmp_path: Path) -> None:
    path = _written(tmp_path)
    _rewrite(path, manifest={"source": 5})
    with pytest.raises(DamagedTrace, match="not a whole manifest"):
        store.read_trace(path)


def test_no_trace_there(tmp_path: Path) -> None:
    with pytest.raises(TraceNotFound, match="there is no"):
        store.read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceNotFound, match=r"it has no manifest\.json"):
        store.read_trace(tmp_path)
    assert not store.is_trace(tmp_path)
    assert store.is_trace(_written(tmp_path))


# -- writing that fails -----------------------------------------------------------------------------------


def test_an_existing_folder_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists already and is left as it is"):
        store.create_folder(tmp_path / "trace")
    assert (tmp_path / "trace" / "mine.txt").read_text() == "mine"


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    assert store.create_folder(tmp_path / "a" / "b" / "trace").is_dir()


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot create the trace folder"):
        store.create_folder(tmp_path / "file" / "trace")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
def test_a_read_only_folder(tmp_path: Path) -> None:
    path = _written(tmp_path)
    path.chmod(0o500)
    try:
        with pytest.raises(OutputError, match=r"cannot write .*: Permission denied"):
            store.write_table(path, "kernels", tiny.table("kernels", []))
    finally:
        path.chmod(0o700)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.EROFS, "Read-only file system"),
        (errno.EACCES, "Permission denied"),
        (errno.EDQUOT, "Disk quota exceeded"),
    ],
)
def test_the_systems_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    path = _written(tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OutputError, match=rf"cannot write .*kernels\.parquet: {reason}; what was written before"):
        store.write_table(path, "kernels", tiny.table("kernels", []))


_FILL = """
import sys; sys.path[:0] = sys.argv[2:]
import resource, signal
from pathlib import Path
import numpy as np, pyarrow as pa
from spikeprof.profiler import store
from spikeprof.profiler.errors import OutputError
from spikeprof.profiler.schema import TABLES
import tiny
folder = Path(sys.argv[1])
store.write_table(folder, "runtime_calls", tiny.table("runtime_calls", [{"name": "before"}]))
table = tiny.table("samples", [{"value": float(x)} for x in np.random.default_rng(1).random(20_000)])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    store.write_table(folder, "samples", table)
except OutputError as error:
    print(error)
"""


def test_a_write_that_fails_half_way_leaves_nothing_of_itself(tmp_path: Path) -> None:
    """A limit on file size stands in for a full disk: the kernel refuses in the middle of the file."""
    path = store.create_folder(tmp_path / "trace")
    tests = Path(__file__).resolve().parent
    command = [sys.executable, "-c", _FILL, str(path), str(tests), str(tests.parent / "src")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"cannot write {path / 'samples.parquet'}: " in done.stdout
    assert "what was written before it stays readable" in done.stdout
    assert sorted(p.name for p in path.iterdir()) == ["runtime_calls.parquet"]
    assert pq.read_table(path / "runtime_calls.parquet").num_rows == 1


def test_a_full_disk_is_told_in_words(tmp_path: Path) -> None:
    """/dev/full refuses every byte with ENOSPC, as a full disk does."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    path = store.create_folder(tmp_path / "trace")
    temporary = path / f".kernels.parquet.{os.getpid()}.tmp"
    real = os.open

    def onto_a_full_disk(name: Any, *arguments: Any) -> int:
        descriptor = real(name, *arguments)
        if Path(name) == temporary:
            temporary.unlink()
            temporary.symlink_to("/dev/full")
        return descriptor

    os.open = onto_a_full_disk  # type: ignore[assignment]
    try:
        with pytest.raises(OutputError, match="the disk is full; what was written before it stays readable"):
            store.write_table(path, "kernels", tiny.table("kernels", KERNELS))
    finally:
        os.open = real
    assert list(path.iterdir()) == []


def test_a_table_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = _written(tmp_path)
    before = (path / "kernels.parquet").read_bytes()

    def fail_half_way() -> None:
        with store.open_table(path, "kernels") as writer:
            writer.write_table(tiny.table("kernels", KERNELS))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_half_way()
    assert (path / "kernels.parquet").read_bytes() == before
    assert not list(path.glob(".*"))


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("this system has no /proc/self/fd")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for i in range(5):
        back = store.read_trace(_written(store.create_folder(tmp_path / str(i))))
        back.table("kernels")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before
