from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from importers.kineto_files import kernel
from paths import SHARED, needs_shared

from spikeprof.profiler import store
from spikeprof.profiler.errors import DamagedTrace, ForeignFile, InputError, NewerSchema, SpikeprofError, TraceNotFound
from spikeprof.profiler.importers import open_trace

GOOD = json.dumps({"schemaVersion": 1, "traceEvents": [kernel("k", i, 1) for i in range(400)]}).encode()

NOT_TRACES: dict[str, tuple[bytes, type[SpikeprofError], str]] = {
    "empty": (b"", TraceNotFound, "empty (0 bytes)"),
    "empty_in_gzip": (gzip.compress(b""), ForeignFile, "blank"),
    "blank": (b" \n", ForeignFile, "blank"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:d7e7\nsize 5\n", ForeignFile, "git lfs pull"),
    "html": (b"\n<!DOCTYPE html><html></html>", ForeignFile, "HTML"),
    "sqlite": (b"SQLite format 3\x00" + bytes(84), ForeignFile, "Nsight Systems SQLite is not read yet"),
    "sqlite_in_gzip": (gzip.compress(b"SQLite format 3\x00" + bytes(84)), ForeignFile, "not read yet"),
    "parquet": (b"PAR1" + bytes(20), ForeignFile, "Parquet"),
    "tar": (bytes(257) + b"ustar\x0000" + bytes(200), ForeignFile, "tar archive"),
    "text": (b"hello", ForeignFile, "b'hello'"),
    "manifest": (b'{"format": "x", "schema_version": 1, "manifest": {}}', ForeignFile, "name its folder"),
    "json_without_events": (b'{"schema": 1, "nodes": []}', ForeignFile, "execution trace"),
    "json_number_list": (b"[1, 2]", ForeignFile, "not of trace events"),
    "json_dict_list": (b'[{"children": []}]', ForeignFile, "not of trace events"),
    "events_are_no_list": (b'{"traceEvents": 3}', ForeignFile, "not a Chrome trace"),
    "other_program": (b'{"traceEvents":[{"ph":"X","cat":"FEE","name":"f","ts":1,"dur":1}]}', ForeignFile, "fee"),
    "cut_json": (GOOD[:-9], DamagedTrace, f"truncated at byte {len(GOOD) - 9}"),
    "cut_gzip": (gzip.compress(GOOD)[:-9], DamagedTrace, f"truncated at byte {len(gzip.compress(GOOD)) - 9}"),
    "corrupt_gzip": (gzip.compress(GOOD)[:40] + b"\xff" * 40, DamagedTrace, "gzip"),
    "gzip_then_rubbish": (gzip.compress(GOOD) + b"rubbish", DamagedTrace, "7 bytes that are not gzip"),
    "bad_json": (b'{"traceEvents": [\n{"ph": "X" "cat": 1}]}', DamagedTrace, "at byte 29, line 2, column 12"),
    "bad_json_beside_nan": (b'{"traceEvents": [\n{"a": NaN} {"b":1}]}', DamagedTrace, "at byte 29, line 2, column 12"),
}


@pytest.mark.parametrize("case", NOT_TRACES)
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    data, error, words = NOT_TRACES[case]
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(error) as caught:
        open_trace(path)
    message = str(caught.value)
    assert words in message
    assert message.startswith(str(path))
    assert "\n" not in message
    assert caught.value.exit_code == 3


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(TraceNotFound, match="there is no"):
        open_trace(tmp_path / "absent")
    with pytest.raises(TraceNotFound, match=r"no manifest\.json"):
        open_trace(tmp_path)


def test_a_folder_of_json_files_says_to_name_one(tmp_path: Path) -> None:
    (tmp_path / "rank0.pt.trace.json.gz").write_bytes(gzip.compress(GOOD))
    with pytest.raises(TraceNotFound, match=r"1 JSON file\(s\).*rank0"):
        open_trace(tmp_path)


def test_a_newer_trace_folder(tmp_path: Path) -> None:
    (tmp_path / store.MANIFEST_NAME).write_text('{"format": "spikeprof-trace", "schema_version": 999}')
    with pytest.raises(NewerSchema):
        open_trace(str(tmp_path))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(GOOD)

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        open_trace(path)


@pytest.mark.parametrize(
    "packed",
    [
        GOOD,
        b"\xef\xbb\xbf" + GOOD,
        b"\n  " + GOOD,
        gzip.compress(GOOD),
        gzip.compress(gzip.compress(GOOD)),
        gzip.compress(GOOD[:99]) + gzip.compress(GOOD[99:]) + bytes(512),
    ],
    ids=["plain", "bom", "space", "gzip", "gzip twice", "gzip members and padding"],
)
def test_a_trace_is_known_by_its_content_not_its_name(tmp_path: Path, packed: bytes) -> None:
    path = tmp_path / "no-suffix"
    path.write_bytes(packed)
    assert len(open_trace(path).table("kernels")) == 400


def test_a_large_gzip_stream_is_read_whole(tmp_path: Path) -> None:
    import random

    noise = random.Random(1).randbytes(3_000_000).hex()  # does not compress: several reads of 1 MiB
    body = json.dumps({"schemaVersion": 1, "noise": noise, "traceEvents": [kernel("k", 1, 1)]}).encode()
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(body, 1) + gzip.compress(b" "))
    assert path.stat().st_size > 2 << 20
    assert len(open_trace(path).table("kernels")) == 1


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, spikeprof.profiler.importers as i\n"
        "assert i.open_trace\n"
        "heavy = {'pyarrow', 'numpy', 'msgspec', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_shared
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("MANIFEST.tsv", ForeignFile),
        ("AMD-AGI+TraceLens/tests/traces/tracediff_test/cpu_op_map.json", ForeignFile),
        ("AMD-AGI+TraceLens/tests/traces/mi300/jax_conv_minimal_08/tw003.xplane.pb.gz", ForeignFile),
        ("GindaChen+nsys-ai/tests/fixtures/mfu_2gpu_before.sqlite.gz", ForeignFile),
        (
            "facebookresearch+HolisticTraceAnalysis/tests/data/execution_trace/benchmark_simple_add_et.json.gz",
            ForeignFile,
        ),
        ("facebookresearch+param/et_replay/tests/inputs/dlrm_kineto.tar.gz", ForeignFile),
        ("gaogaotiantian+viztracer/tests/data/multithread.json", ForeignFile),
        ("google+perfetto/json_edge/json__test_json_incomplete.json", DamagedTrace),
        ("google+perfetto/json_edge/json__test_args_ordered.json", DamagedTrace),
        ("openxla+xprof/plugin/trace_viewer/tf_trace_viewer/data/trace.json", ForeignFile),
        ("triton-lang+triton/third_party/proton/test/examples/cuda.json", ForeignFile),
    ],
)
def test_real_files_that_are_no_torch_profiler_traces(name: str, error: type[SpikeprofError]) -> None:
    with pytest.raises(error):
        open_trace(SHARED / "traces" / name)
