"""Records of scans to rows of ``tensor_stats``: values by hand, damage counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from spikeprof.profiler.assemble.numerics import NumericsEvents, write_stats
from spikeprof.profiler.inject.numerics import records
from spikeprof.profiler.inject.numerics.formats import FORMATS
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import CollectorNote

T0 = 1_790_000_000_000_000_000


def record(
    ticket: int, *, form: str = "float16", point: int = 0, order: int = 0, step: int = 0, at: int = 0,
    laid_out: int = 0, **more: int,
) -> bytes:  # fmt: skip
    names = dict.fromkeys(records.STATISTICS, 0) | {"amax": -1, "smallest": -1, "first_bad": -1} | more
    tag = order << 32 | FORMATS[form].number << 24 | point
    return records.pack(ticket, step, tag, T0 + at, 100, list(names.values()), laid_out | records.LATER)


def frame(*made: bytes, at: int = 1000, device: int = 0) -> bytes:
    data = b"".join(made)
    return records.FRAME_HEADER.pack(records.FRAME_MAGIC, len(data), T0 + at, device) + data


def told() -> NumericsEvents:
    found = NumericsEvents()
    found.begun({})
    found.add_points({"points": [[0, 0, "layers.0", "Linear", "output", 0, -1], [1, 0, "", "Model", "output", 0, 0]]})
    return found


def built(
    folder: Path, data: bytes, events: NumericsEvents | None = None
) -> tuple[list[dict[str, Any]], CollectorNote]:
    stem = folder / "77-1"
    (folder / f"77-1{records.SUFFIX}").write_bytes(data)
    trace = folder / "trace"
    trace.mkdir()
    note = write_stats(trace, [(3, stem, events or told())], T0)
    assert note is not None
    import pyarrow.parquet as pq

    table = pq.read_table(trace / "tensor_stats.parquet")
    assert table.schema.names == TABLES["tensor_stats"].arrow.names
    return table.to_pylist(), note


def test_a_record_becomes_a_row_with_values_and_names(tmp_path: Path) -> None:
    one = record(
        0, step=4, order=9, at=50, amax=0x7BFF, smallest=1, nan=2, inf=3, subnormal=4, zero=5, saturated=6, first_bad=7,
        bad_rows=-(1 << 63) | 2, laid_out=25 << records.ROW_SHIFT | 3 << records.DIMENSIONS_SHIFT,
    )  # fmt: skip
    events = told()
    events.add_scales({"scales": [[0, 0, "bfloat16", 1]]})
    rows, note = built(tmp_path, frame(one), events)
    assert rows == [
        {
            "rank": 3, "step": 4, "order": 9, "module": "layers.0", "class_name": "Linear", "role": "output",
            "dtype": "float16", "elements_count": 100, "amax_value": 65504.0, "smallest_value": 2.0**-24,
            "nan_count": 2, "inf_count": 3, "subnormal_count": 4, "zero_count": 5, "saturated_count": 6,
            "first_bad_index": 7, "real_amax_value": 65504.0, "real_dtype": "bfloat16",
            "dimensions_count": 3, "rows_count": 4, "bad_rows": 1 << 63 | 2, "scanned": "later", "t_ns": 50,
        }
    ]  # fmt: skip
    assert (note.state, note.reason, note.records_count, note.dropped_count) == ("ok", "", 1, 0)


@pytest.mark.parametrize(
    ("form", "bits", "value"),
    [
        ("float16", 0x3C00, 1.0), ("float16", 0x0001, 2.0**-24), ("bfloat16", 0x7F7F, 3.3895313892515355e38),
        ("bfloat16", 0x4049, 3.140625), ("float32", 0x3F800001, 1.00000011920929), ("float64", 0x4009 << 48, 3.125),
        ("float8_e4m3fn", 0x7E, 448.0), ("float8_e4m3fn", 0x01, 2.0**-9), ("float8_e5m2", 0x7B, 57344.0),
        ("int8", 128, 128.0), ("uint8", 255, 255.0), ("int4", 15, 15.0), ("float16", -1, math.nan),
    ],
)  # fmt: skip
def test_magnitudes_of_every_format(tmp_path: Path, form: str, bits: int, value: float) -> None:
    rows, _ = built(tmp_path, frame(record(0, form=form, amax=bits, smallest=bits)))
    assert rows[0]["dtype"] == form
    assert rows[0]["amax_value"] == pytest.approx(value, rel=1e-12, nan_ok=True)
    assert rows[0]["smallest_value"] == pytest.approx(value, rel=1e-12, nan_ok=True)
    assert FORMATS[form].value(bits) == (None if math.isnan(value) else pytest.approx(value, rel=1e-12))


def test_rows_of_models_that_take_tokens_first_are_not_told(tmp_path: Path) -> None:
    events = NumericsEvents()
    events.begun({})
    events.has_tokens_first({"root": 1})
    events.add_points({"points": [[0, 0, "a", "Linear", "output", 0, -1], [1, 1, "b", "Linear", "output", 0, -1]]})
    laid_out = 25 << records.ROW_SHIFT | 3 << records.DIMENSIONS_SHIFT
    made = [record(at, at=at, point=at, bad_rows=2, laid_out=laid_out) for at in (0, 1)]
    rows, _ = built(tmp_path, frame(*made), events)
    assert [(row["module"], row["rows_count"], row["bad_rows"]) for row in rows] == [("a", 4, 2), ("b", 0, 0)]


def test_codes_stand_for_what_their_scale_makes_of_them(tmp_path: Path) -> None:
    events = NumericsEvents()
    events.begun({})
    events.add_points({"points": [[at, -1, f"p{at}", "Tensor", "kv", 0, -1] for at in range(6)]})
    events.add_points({"points": [[7, -1, "p7", "Tensor", "scale", 0, 5]]})  # the same tensor as point 5
    events.add_scales(
        {
            "scales": [
                [0, 5, "float32", 0], [1, 7, "float16", 0], [2, 5, "float16", 1], [4, 9, "float16", 0],
            ]
        }
    )  # fmt: skip
    sizes = {1.0: 0x3C00, 2.0: 0x4000, 4.0: 0x4400}
    made = [
        record(0, step=0, order=0, point=0, form="int8", amax=100),
        record(1, step=0, order=1, point=5, amax=sizes[2.0]),
        record(2, step=0, order=2, point=0, form="int8", amax=10),  # no scan of the scale after it: the one before
        record(3, step=1, order=0, point=0, form="int8", amax=7),
        record(4, step=1, order=1, point=1, form="int8", amax=7),
        record(5, step=1, order=2, point=5, amax=sizes[4.0]),
        record(6, step=1, order=3, point=2, form="int8", amax=7),
        record(7, step=2, order=1, point=4, form="int8", amax=1),
    ]
    rows, _ = built(tmp_path, frame(*made), events)
    rows.sort(key=lambda row: (row["step"], row["order"]))
    found = [row["real_amax_value"] for row in rows if row["dtype"] != "float16"]
    assert found[:-1] == [
        200.0, 20.0,  # codes times 2
        28.0,  # times 4: the next scan in the step
        28.0,  # the scale is another one's, too
        4.0,  # what is scanned reaches that far by itself
    ]  # fmt: skip
    assert math.isnan(found[-1])  # its scale was never scanned
    assert [row["real_dtype"] for row in rows if row["step"] == 0] == ["float32", "", "float32"]


def test_torn_lost_and_double_records_are_counted(tmp_path: Path) -> None:
    torn = bytearray(record(2))
    torn[40] ^= 1
    twice = record(3, at=3)
    rows, note = built(tmp_path, frame(record(0), bytes(torn), twice) + frame(twice, record(6, at=6)))
    assert [row["t_ns"] for row in rows] == [0, 3, 6]
    assert note.state == "degraded"
    assert note.set_aside_count == 1
    assert note.dropped_count == 3  # tickets 1, 4 and 5: the torn one is told apart
    assert "3 not scanned: written over before they were read" in note.reason


def test_a_file_cut_short_keeps_what_is_whole(tmp_path: Path) -> None:
    rows, _ = built(tmp_path, frame(record(0), record(1))[:-5])
    assert len(rows) == 1


def test_a_device_clock_of_its_own_is_set_by_when_records_were_read(tmp_path: Path) -> None:
    ahead = 3_600_000_000_000
    rows, _ = built(tmp_path, frame(record(0, at=ahead + 100), record(1, at=ahead + 900), at=1000))
    assert [row["t_ns"] for row in rows] == [200, 1000]  # the newest was made when it was read, at the latest


def test_what_was_not_checked_and_why_is_named(tmp_path: Path) -> None:
    events = told()
    events.add_unchecked({"places": [[f"layers.{i}", "dtype int64"] for i in range(5)] + [["", "layout sparse"]]})
    events.ended({"losses": {"no room in the table": 2}})
    rows, note = built(tmp_path, b"", events)
    assert rows == []
    assert note.state == "degraded"
    assert note.reason == (
        "2 not scanned: no room in the table; not checked: layers.0, layers.1, layers.2 and 2 more (dtype int64); "
        "not checked: the model itself (layout sparse)"
    )


def test_where_nobody_asked_there_is_no_table(tmp_path: Path) -> None:
    assert write_stats(tmp_path, [(0, tmp_path / "1-1", NumericsEvents())], T0) is None
    assert not (tmp_path / "tensor_stats.parquet").exists()
