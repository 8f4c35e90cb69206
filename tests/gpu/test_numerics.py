"""The scan on a GPU: the same numbers as torch's on the CPU, eager and replayed, and nothing on healthy models."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fault_matrix import Fault, Three, check, faults, said  # noqa: E402
from torch import nn  # noqa: E402

import spikeprof  # noqa: E402
from spikeprof.profiler.inject.numerics import scan_torch  # noqa: E402
from spikeprof.profiler.inject.numerics.formats import FLOAT, FORMATS  # noqa: E402
from spikeprof.profiler.watching import Watch  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
VIEWS = {
    "whole": lambda t: t,
    "odd": lambda t: t[:8193],
    "one": lambda t: t[:1],
    "empty": lambda t: t[:0],
    "not aligned": lambda t: t[1:],
    "transposed": lambda t: t[:6400].view(64, 100).t(),
    "sliced": lambda t: t[:6400].view(64, 100)[3:50, 5:71],
    "expanded": lambda t: t[:64].view(1, 64).expand(50, 64),
}


class Gives(nn.Module):
    """A module that gives a view of a tensor that stays where it is."""

    def __init__(self, base: Any, view: Any) -> None:
        super().__init__()
        self.base, self.view = base, view

    def forward(self) -> Any:
        return self.view(self.base)


class All(nn.Module):
    """One module for each dtype and view."""

    def __init__(self) -> None:
        super().__init__()
        for name in DTYPES:
            for view in VIEWS.values():
                base = torch.arange(300_001, device="cuda") % 90 + 1
                self.add_module(f"m{len(self._modules)}", Gives(base.float().to(getattr(torch, name)), view))

    def forward(self) -> None:
        for module in self._modules.values():
            module()


def compare(watched: Watch, model: All, step: int) -> None:
    """Every record of the step against a scan of the same tensor by torch on the CPU."""
    rows = {row["module"]: row for row in watched.stats() if row["step"] == step}
    assert len(rows) == len(model._modules)
    for name, module in model.named_children():
        tensor, row = module().cpu(), rows[name]
        form = FORMATS[str(tensor.dtype).removeprefix("torch.")]
        amax, smallest, *counts, bad_rows = scan_torch.scan(tensor, form)
        found = [row[f"{what}_count"] for what in ("nan", "inf", "subnormal", "zero", "saturated")]
        assert [*found, row["first_bad_index"]] == counts, (name, form.name)
        assert row["bad_rows"] == bad_rows % (1 << 64), (name, form.name)
        assert (row["amax_value"], row["smallest_value"]) == (form.value(amax), form.value(smallest)), (name, form.name)


def spoil(model: All, turn: int) -> None:
    """One special element in each tensor, at its begin, middle or end."""
    for module in model.children():
        form = FORMATS[str(module.base.dtype).removeprefix("torch.")]
        flat = module.base.view(WHOLE[form.item_bytes])
        values = [form.sign_mask, form.largest, 1, 0] if form.kind == FLOAT else [127, 128, 255, 0]
        infinite = form.kind == FLOAT and form.infinity <= form.sign_mask
        place = (0, len(flat) // 2, -1)[turn % 3]
        flat[place] = form.infinity if infinite and turn == 0 else values[turn % 4]


def test_every_dtype_and_view_eager_and_replayed() -> None:
    model = All()
    with spikeprof.watch(model) as watched:
        model()
        compare(watched, model, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model()
        for turn in range(5):
            spoil(model, turn)
            model()
            compare(watched, model, 1 + 2 * turn)
            graph.replay()
            compare(watched, model, 2 + 2 * turn)
    assert watched.remarks == []
    assert [place for place in watched.unchecked if place[0]] == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e5m2"])
def test_bad_rows_are_those_of_the_scan_on_the_cpu(dtype: str) -> None:
    """Rows with a bit of their own and ranges of them, of one program and of many; views; a replay."""
    shapes = ((3, 40_000), (4, 16, 64), (64, 100_003), (65, 7), (1000, 2001), (200_000, 2))
    bases = [torch.ones(shape, device="cuda").to(getattr(torch, dtype)) for shape in shapes]
    views = (lambda t: t, lambda t: t.transpose(0, 1), lambda t: t[1:])
    model = nn.Sequential(*(Gives(base, view) for base in bases for view in views))
    model.forward = lambda: [each() for each in model] and None  # type: ignore[method-assign]
    with spikeprof.watch(model) as watched:
        model()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model()
        for turn in range(3):
            for base in bases:
                bits = base.view(WHOLE[base.element_size()]).view(-1)
                bits[torch.randint(len(bits), (turn * 3,), device="cuda")] = FORMATS[dtype].infinity
            graph.replay()
    rows = {row["module"]: row for row in watched.stats() if row["step"] == 3}
    assert len(rows) == len(model)
    for name, module in model.named_children():
        tensor = module().cpu()
        found = (rows[name]["rows_count"], rows[name]["bad_rows"])
        assert found == (tensor.shape[0], scan_torch.scan(tensor, FORMATS[dtype])[-1] % (1 << 64)), name


def test_scales_on_the_device_are_taken_into_account() -> None:
    codes = torch.tensor([[-128, 3], [127, 0]], dtype=torch.int8, device="cuda")
    scale = torch.tensor([0.5, 4.0], dtype=torch.float16, device="cuda")
    model = nn.Identity()
    with spikeprof.watch(model) as watched:
        model(scale)
        watched.look("symmetric", codes, scale=scale)
        watched.look("asymmetric", codes.view(torch.uint8), scale=scale, zero_point=torch.ones(2, device="cuda") * 55)
    found = {
        row["module"]: (row["real_amax_value"], row["real_dtype"]) for row in watched.stats() if row["role"] == "kv"
    }
    assert found == {"symmetric": (512.0, "float16"), "asymmetric": (800.0, "float16")}


@pytest.mark.parametrize("fault", faults(), ids=str)
@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
def test_every_fault_is_found_in_the_right_module(mode: str, fault: Fault) -> None:
    if mode == "compiled" and fault.view != "whole":
        pytest.skip("what is compiled gives a copy")
    model = Three(fault, "cuda", copies=mode == "compiled")
    called: Any = torch.compile(model) if mode == "compiled" else model
    with torch.no_grad(), spikeprof.watch(called) as watched:
        called()
        if mode == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model()
            called = graph.replay
        assert said(watched).findings == ()
        fault.put(model.faulty.base)
        called()
        check(fault, watched, module="(model)" if mode == "compiled" else "faulty")


def test_one_bad_element_of_ten_million() -> None:
    tensor = torch.ones(10_000_019, dtype=torch.float16, device="cuda")
    model = Gives(tensor, lambda t: t)
    with spikeprof.watch(model) as watched:
        for place in (0, 5_000_000, 10_000_018):
            tensor[place] = math.nan
            model()
            tensor[place] = 1.0
    assert [(row["nan_count"], row["first_bad_index"]) for row in watched.stats()] == [
        (1, 0), (1, 5_000_000), (1, 10_000_018),
    ]  # fmt: skip


def test_every_second_step_of_a_graph() -> None:
    model = nn.Linear(64, 64, device="cuda", dtype=torch.float16)
    x = torch.ones(1, 64, device="cuda", dtype=torch.float16)
    with torch.no_grad(), spikeprof.watch(model, every=2) as watched:
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        for _ in range(7):
            graph.replay()
    assert [row["step"] for row in watched.stats()] == [0, 2, 4, 6]


def test_outputs_of_several_streams_in_one_step() -> None:
    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)
            self.side = torch.cuda.Stream()

        def forward(self, x: Any) -> Any:
            made = self.first(x)
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                torch.cuda._sleep(20_000_000)
                other = self.second(x)
            torch.cuda.current_stream().wait_stream(self.side)
            return made + other

    model = Streams().cuda().half()
    x = torch.ones(4, 512, device="cuda", dtype=torch.float16)
    with torch.inference_mode(), spikeprof.watch(model) as watched:
        expected = (model.first(x).abs().max().item(), model.second(x).abs().max().item())
        for _ in range(3):
            model(x)
    rows = watched.stats()
    for step in range(3):
        found = {row["module"]: row["amax_value"] for row in rows if row["step"] == step}
        assert (found["first"], found["second"]) == expected


@pytest.mark.parametrize("preset", ["tiny", "100m", "240m", "1b", "3b", "7b"])
def test_healthy_models_in_fp16_raise_no_alarm(preset: str) -> None:
    from spikeprof.kernels.engine import Engine

    engine = Engine(preset, max_seq_len=256, max_batch=2)
    with spikeprof.watch(engine.runner.decoder.network) as watched:
        engine.generate([[1, 2, 3, 4] * 16, [5, 6, 7]], 8)
    rows = watched.stats()
    assert {row["dtype"] for row in rows} == {"float16"}
    assert not [row for row in rows if row["nan_count"] or row["inf_count"] or row["saturated_count"]]
    assert len({row["step"] for row in rows}) >= 8
    result = said(watched)
    print(preset, "headroom in bits", result.metric("float16_headroom_bits"))
    assert [finding.rule for finding in result.findings if finding.severity != "info"] == []
    assert (result.metric("float16_headroom_bits") or 0.0) > 2
