from __future__ import annotations

from pathlib import Path

import pytest
from assemble.spools import LAYOUT, frame, record

from spikeprof.profiler.assemble import layouts as lay
from spikeprof.profiler.assemble import names
from spikeprof.profiler.assemble.names import NameTail, demangle


def _kernels(*pointers: int) -> bytes:
    return frame(b"".join(record(lay.KERNEL, name=p) for p in pointers))


def test_new_pointers_once_each_as_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "a.act"
    tail = NameTail(path, LAYOUT)
    assert tail.new_pointers() == []
    path.write_bytes(_kernels(48, 16, 48))
    assert tail.new_pointers() == [16, 48]
    assert tail.new_pointers() == []
    with path.open("ab") as file:
        file.write(_kernels(16, 64) + frame(record(lay.DEVICE, name=80)) + frame(record(lay.RUNTIME)))
    assert tail.new_pointers() == [64, 80]


def test_a_reader_that_is_far_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "BATCH_BYTES", 500)
    path = tmp_path / "a.act"
    path.write_bytes(b"".join(_kernels(16 * i, 16 * i + 16) for i in range(1, 8)))
    tail = NameTail(path, LAYOUT)
    assert tail.new_pointers() == [16 * i for i in range(1, 9)]
    assert tail.new_pointers() == []


def test_a_frame_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.act"
    tail = NameTail(path, LAYOUT)
    one, two = _kernels(16), _kernels(32, 48)
    for cut in range(0, len(two), 20):
        path.write_bytes(one + two[:cut])
        assert tail.new_pointers() == ([16] if cut == 0 else [])
    path.write_bytes(one + two)
    assert tail.new_pointers() == [32, 48]


def test_a_null_pointer_has_no_name(tmp_path: Path) -> None:
    path = tmp_path / "a.act"
    path.write_bytes(_kernels(0, 16))
    assert NameTail(path, LAYOUT).new_pointers() == [16]


def test_readable_names() -> None:
    if demangle("_Z1fv") == "_Z1fv":
        pytest.skip("no C++ runtime library is here to demangle with")
    mangled = "_ZN2at6native29vectorized_elementwise_kernelILi4EfEEvT0_"
    readable = "void at::native::vectorized_elementwise_kernel<4, float>(float)"
    assert demangle(mangled) == readable
    assert {name: demangle(name) for name in (mangled, "triton_poi_fused_add_0")} == {
        mangled: readable,
        "triton_poi_fused_add_0": "triton_poi_fused_add_0",
    }


@pytest.mark.parametrize("name", ["", "triton_mm", "_Znot a name", "_Z", "_ZN", "größe", "_Zgröße", "a\0b"])
def test_names_that_are_not_cpp_stay(name: str) -> None:
    assert demangle(name) == name


def test_without_a_demangler_names_stay_mangled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_demangler", lambda: None)
    assert demangle("_Z1fv") == "_Z1fv"
