"""The scan: numbers by hand, Triton and torch alike, every format, shape and view."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inject.numerics.scanning import CODES, FLOATS, WHOLE, by_numpy, by_triton, scan_all

from spikeprof.profiler.inject.numerics import records, scan_torch, scanners
from spikeprof.profiler.inject.numerics import scanner as scanner_module
from spikeprof.profiler.inject.numerics.formats import FORMATS
from spikeprof.profiler.inject.numerics.scanner import TritonScanner, Unchecked, merged

FP16 = FORMATS["float16"]


def both(kernels: ModuleType, tensor: Any, name: str) -> list[int]:
    """The statistics but for the rows, which both ways must agree on, in these, too."""
    found = scan_torch.scan(tensor, FORMATS[name])
    assert by_triton(kernels, tensor, FORMATS[name]) == found
    return found[:-1]


@pytest.mark.parametrize("name", FLOATS)
def test_limits_of_the_formats_are_torchs(name: str) -> None:
    form, info = FORMATS[name], torch.finfo(getattr(torch, name))
    assert form.limit == info.max
    assert form.value(form.normal) == info.smallest_normal
    assert form.value(1) == getattr(info, "smallest_subnormal", form.value(1))
    assert form.value(-1) is None


@pytest.mark.parametrize("name", FLOATS)
def test_every_class_of_value_counted_by_hand(kernels: ModuleType, device: Any, name: str) -> None:
    width, nan, infinity, largest, normal = FLOATS[name]
    sign = 1 << (width - 1)
    bits = [normal, 0, sign, largest, sign | largest, nan, sign | nan, normal - 1, sign | 1, normal]
    bits += [infinity, sign | infinity] if infinity is not None else [nan, nan]
    raw = torch.tensor(
        [bit - (1 << width) if bit >= sign and width > 8 else bit for bit in bits], dtype=WHOLE[width // 8]
    )
    tensor = raw.to(device).view(getattr(torch, name))
    nans, infs = (2, 2) if infinity is not None else (4, 0)
    assert both(kernels, tensor, name) == [largest, 1, nans, infs, 2, 2, 2, 5]


def test_codes_by_hand(kernels: ModuleType, device: Any) -> None:
    codes = torch.tensor([0, 1, -1, 127, -127, -128, 5, 0], dtype=torch.int8, device=device)
    assert both(kernels, codes, "int8") == [128, 1, 0, 0, 0, 2, 3, -1]
    assert both(kernels, codes.view(torch.uint8), "uint8") == [255, 1, 0, 0, 0, 2, 3, -1]
    packed = torch.tensor([0x00, 0xF1, 0x2F], dtype=torch.uint8, device=device)  # 0 0 1 15 15 2
    assert both(kernels, packed, "int4") == [15, 1, 0, 0, 0, 2, 4, -1]


@pytest.mark.parametrize("name", [*FLOATS, *CODES])
def test_an_empty_tensor_has_no_extremes(kernels: ModuleType, device: Any, name: str) -> None:
    dtype = torch.uint8 if name == "int4" else getattr(torch, name)
    assert both(kernels, torch.empty((0, 3), dtype=dtype, device=device), name) == [-1, -1, 0, 0, 0, 0, 0, -1]


def test_bad_values_hide_neither_each_other_nor_the_rest(kernels: ModuleType, device: Any) -> None:
    tensor = torch.tensor([0.0, math.inf, math.nan, -math.inf], dtype=torch.float16, device=device)
    assert both(kernels, tensor, "float16") == [0, -1, 1, 2, 0, 1, 0, 1]
    assert both(kernels, tensor[1:].clone(), "float16") == [-1, -1, 1, 2, 0, 0, 0, 0]


@given(data=st.data(), name=st.sampled_from([*FLOATS, *CODES]), count=st.integers(1, 5000))
@settings(max_examples=40, deadline=None)
def test_any_bits_are_counted_as_numpy_counts_them(
    interpreted: ModuleType, data: st.DataObject, name: str, count: int
) -> None:
    form = FORMATS[name]
    seed = data.draw(st.integers(0, 1 << 30))
    raw = np.random.default_rng(seed).integers(0, 256, count * form.item_bytes, np.uint8).view(f"u{form.item_bytes}")
    if form.item_bytes > 1:  # among random bits special ones are rare
        specials = np.array(FLOATS[name][1:], raw.dtype)
        places = data.draw(st.lists(st.integers(0, count - 1), max_size=5))
        raw[places] = specials[np.arange(len(places)) % len(specials)]
    assert both(interpreted, torch.from_numpy(raw.view(f"i{form.item_bytes}").copy()), name) == by_numpy(raw, form)


def _views() -> dict[str, Any]:
    return {
        "transposed": lambda t: t[: 40 * 50].view(40, 50).t(),
        "sliced": lambda t: t[: 40 * 50].view(40, 50)[3:37, 5:41],
        "every second": lambda t: t[:2001:2],
        "not aligned": lambda t: t[1:1500],
        "permuted": lambda t: t[: 2 * 3 * 5 * 7].view(2, 3, 5, 7).permute(0, 2, 3, 1),
        "expanded": lambda t: t[:9].view(1, 9).expand(20, 9),
        "overlapping": lambda t: t.as_strided((30, 30), (1, 1)),
        "a scalar": lambda t: t[17],
        "of one row": lambda t: t[: 40 * 50].view(40, 50)[5:6],
    }


@pytest.mark.parametrize("view", _views())
@pytest.mark.parametrize("name", ["float16", "float32", "float8_e4m3fn"])
def test_views_are_scanned_in_their_own_order(kernels: ModuleType, device: Any, name: str, view: str) -> None:
    base = torch.randn(2001, generator=torch.Generator().manual_seed(3)).to(getattr(torch, name)).to(device)
    seen = _views()[view](base)
    assert both(kernels, seen, name)[2:4] == [0, 0]
    base[[8, 17]] = math.nan
    flat = seen.float().contiguous().flatten().isnan().nonzero().flatten().tolist()
    found = both(kernels, seen, name)
    assert (found[2], found[7]) == (len(flat), flat[0] if flat else -1)


def rows_by_numpy(tensor: Any) -> int:
    """The mask of bad rows, one row after the other."""
    rows, mask = tensor.shape[0], 0
    for row in range(rows):
        if not tensor[row].float().isfinite().all():
            mask |= 1 << (row if rows <= 64 else row * 64 // rows)
    return mask


def rows_by_both(kernels: ModuleType, tensor: Any) -> int:
    found = scan_torch.scan(tensor, FORMATS[str(tensor.dtype).removeprefix("torch.")])[-1]
    assert by_triton(kernels, tensor, FORMATS[str(tensor.dtype).removeprefix("torch.")])[-1] == found
    return found % (1 << 64)


@pytest.mark.parametrize("name", ["float16", "float64", "float8_e5m2"])
@pytest.mark.parametrize(
    ("shape", "bad", "mask"),
    [
        ((3, 5), [(1, 4)], 0b010), ((2, 4, 7), [(0, 3, 6), (1, 0, 0)], 0b11), ((5,), [(2,)], 0), ((1, 9), [(0, 0)], 1),
        ((64, 3), [(0, 0), (63, 2)], 1 << 63 | 1), ((64, 2), [(row, 0) for row in range(63)], (1 << 63) - 1),
        ((65, 3), [(0, 0), (1, 0)], 1), ((65, 3), [(2, 1), (64, 2)], 1 << 63 | 0b10), ((1000, 2), [(999, 1)], 1 << 63),
        ((4, 40_000), [(1, 0), (3, 39_999)], 0b1010), ((70_000, 1), [(0, 0), (35_000, 0)], 1 << 32 | 1),
    ],
)  # fmt: skip
def test_rows_with_bad_elements_by_hand(
    kernels: ModuleType, device: Any, name: str, shape: tuple[int, ...], bad: list[tuple[int, ...]], mask: int
) -> None:
    """Up to 64 rows one by one, more as ranges; in one program and in many; of one dimension none."""
    tensor = torch.ones(shape, device=device)
    for number, place in enumerate(bad):
        tensor[place] = (math.inf, math.nan)[number % 2]
    assert rows_by_both(kernels, tensor.to(getattr(torch, name))) == mask


@pytest.mark.parametrize("view", ["transposed", "sliced", "permuted", "expanded", "overlapping", "of one row"])
def test_rows_of_views_are_those_of_the_view(kernels: ModuleType, device: Any, view: str) -> None:
    base = torch.ones(2001, dtype=torch.float16, device=device)
    base[[8, 17, 211, 256]] = math.nan
    seen = _views()[view](base)
    assert rows_by_both(kernels, seen) == rows_by_numpy(seen)


@given(data=st.data(), rows=st.integers(1, 200), row=st.integers(1, 60))
@settings(max_examples=25, deadline=None)
def test_rows_of_any_shape_are_told_as_one_by_one(
    interpreted: ModuleType, data: st.DataObject, rows: int, row: int
) -> None:
    tensor = torch.ones(rows, row, dtype=torch.bfloat16)
    for place in data.draw(st.lists(st.integers(0, rows * row - 1), max_size=5)):
        tensor.view(-1)[place] = math.inf
    assert rows_by_both(interpreted, tensor) == rows_by_numpy(tensor)


def test_codes_have_no_bad_rows(kernels: ModuleType, device: Any) -> None:
    ends = torch.full((3, 5), -128, dtype=torch.int8, device=device)
    assert rows_by_both(kernels, ends) == 0


def test_neighbouring_dimensions_are_one() -> None:
    assert merged(torch.empty(2, 3, 4, 5, 6, 7)[..., ::2], 4) == [4, 720, 1, 1, 2, 7, 0, 0]
    assert merged(torch.empty(4, 6)[:, :3], 4) == [3, 4, 1, 1, 1, 6, 0, 0]
    assert merged(torch.empty(5, 1, 4).transpose(0, 2), 4) == [5, 4, 1, 1, 4, 1, 0, 0]
    knotted = torch.empty(3, 3, 3, 3, 3)[::2, ::2, ::2, ::2, ::2]
    with pytest.raises(Unchecked, match="more than 4 strides"):
        merged(knotted, 4)


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 32 * 4096, 32 * 4096 + 1, 40 * 4096 - 1])
def test_one_bad_element_is_found_wherever_it_is(kernels: ModuleType, device: Any, count: int) -> None:
    """Within a part, at the edges of parts, where programs share, beyond what waits for others."""
    tensor = torch.ones(count, dtype=torch.float16, device=device)
    one = 0x3C00 if count > 1 else -1
    for place in {0, count // 2, count - 1}:
        tensor[place] = math.inf
        assert by_triton(kernels, tensor, FP16) == [one, one, 0, 1, 0, 0, 0, place, 0]
        tensor[place] = 1.0


def test_many_tensors_of_several_formats_in_one_step(kernels: ModuleType, device: Any) -> None:
    """Each gets its own numbers, step after step."""
    scanner = TritonScanner(torch, device, kernels)
    tensors = []
    for number in range(0, 20, 2):
        name = ["float16", "float32", "int8"][number % 3]
        values = torch.arange(1, 10 + 997 * number, device=device) % 100
        tensors.append((values.to(getattr(torch, name)), FORMATS[name]))
    expected = [scan_torch.scan(tensor, form) for tensor, form in tensors]
    for _ in range(3):  # the scratch memory must be as before
        assert scan_all(scanner, tensors) == expected
    assert scanner.lost == 0


def test_a_full_table_is_counted_and_nothing_waits(kernels: ModuleType, device: Any) -> None:
    scanner = TritonScanner(torch, device, kernels)
    scanner.memory._finished[:] = memoryview(bytes(scanner.memory._finished.nbytes)).cast("q")  # nothing has ended
    scanner.begin()
    scanner.add(torch.ones(8, dtype=torch.float16, device=device), FP16, 0)
    assert scanner.lost == 1


class Faulty:
    """Kernels whose results are wrong where elements are counted in pairs, and elsewhere too if asked for."""

    def __init__(self, kernels: ModuleType, wrong: tuple[int, ...]) -> None:
        self._kernels, self._wrong = kernels, wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def constants(self, form: Any, strided: bool, pairs: int) -> dict[str, int]:
        made: dict[str, int] = self._kernels.constants(form, strided, min(pairs, 1))
        return {**made, "NORMAL": 7} if pairs in self._wrong else made


def test_the_proof_leaves_no_ticket_behind(kernels: ModuleType, device: Any) -> None:
    scanner = TritonScanner(torch, device, kernels)
    scanner.prove()
    found = scan_all(scanner, [(torch.ones(8, dtype=torch.float16, device=device), FP16)])
    assert found == [scan_torch.scan(torch.ones(8, dtype=torch.float16), FP16)]
    assert (scanner.memory._ring[records.TICKET], scanner.memory._ring[records.STEP]) == (1, 0)


@pytest.mark.parametrize(("wrong", "expected"), [((2,), TritonScanner), ((0, 2), scanners.TorchScanner)])
def test_kernels_that_find_the_wrong_numbers_are_not_used(
    interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch, wrong: tuple[int, ...], expected: type
) -> None:
    said: list[str] = []
    monkeypatch.setattr(scanners, "load_kernels", lambda needs_gpu: Faulty(interpreted, wrong))
    monkeypatch.setattr(scanners, "_has_pairs", lambda torch, device: True)

    class Gpu:  # a CPU that says it is one
        type, index = "cuda", 0

    made = TritonScanner

    def on_the_cpu(torch_: Any, device: Any, kernels_: Any, pairs: int) -> Any:
        return made(torch_, torch.device("cpu"), kernels_, pairs)

    monkeypatch.setattr(scanners, "TritonScanner", on_the_cpu)
    found = scanners.scanner_for(Gpu(), scanners.TorchScanner, said.append)
    assert isinstance(found, expected)
    assert len(said) == (expected is not TritonScanner)


class ShortWay:
    """What stands in for a launcher: it launches by Triton's interpreter, or does something else."""

    def __init__(self, how: str, start: Any) -> None:
        self.how, self.start, self.count = how, start, 0

    def launch(self, programs: int, stream: int, numbers: tuple[int, ...]) -> None:
        self.count += 1
        if self.how == "fails":
            raise RuntimeError("cuLaunchKernel failed: error 1")
        if self.how == "works":
            self.start(programs, stream, numbers)


@pytest.mark.parametrize(("how", "used"), [("works", 2), ("fails", 1), ("does nothing", 1)])
def test_the_short_way_to_launch_is_taken_where_it_finds_the_same(
    interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch, how: str, used: int
) -> None:
    scanner = TritonScanner(torch, torch.device("cpu"), interpreted)
    scanner._short_way = True  # as on a GPU
    short = ShortWay(how, lambda *launch: scanner._start_by_triton(scanner._ready[FP16.number, False], *launch))
    monkeypatch.setattr(scanner_module, "launcher_for", lambda compiled, pointers, count: short)
    scanner.prove()
    tensor = torch.tensor([1.0, math.nan, 0.0], dtype=torch.float16)
    assert scan_all(scanner, [(tensor, FP16)]) == [scan_torch.scan(tensor, FP16)]
    assert short.count == used
    assert scanner.memory.state.tolist()[:3] == [0, 1, 0]  # the first step, one record: those of the proof are not told
