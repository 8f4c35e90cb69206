"""The analyzer on real tensors: small models on the CPU whose numbers leave their format, by the collector's scan."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scanned import asked, evidence, found, of_tensor, rules

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `kernels`)")
nn = torch.nn

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def watched(model: Any, *inputs: Any) -> list[dict[str, Any]]:
    """A scan of what each module gives, one step for each input, in the order in which the modules end."""
    rows: list[dict[str, Any]] = []
    began: list[int] = []
    handed_on = [None]

    def hook(name: str, kind: str) -> Any:
        def scanned(_module: Any, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor is handed_on[-1]:  # by a child: the collector scans it once
                return
            handed_on.append(tensor)
            rows.append(of_tensor(tensor, len(began) - 1, len(rows) - began[-1], name, class_name=kind))

        return scanned

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name, type(module).__name__))
    with torch.inference_mode():
        for given in inputs:
            began.append(len(rows))
            model(given)
    return rows


class Quantise(nn.Module):
    """Symmetric INT8 codes with a scale that was calibrated before."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Any) -> Any:
        return torch.clamp(torch.round(x.float() / self.scale), -128, 127).to(torch.int8)


class Residual(nn.Module):
    """Layers that add to a stream, with weights too large for it, then a norm; ``codes`` quantises the stream."""

    def __init__(self, layers: int, size: float, codes: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(layers))
        self.adds = nn.ModuleList(nn.Identity() for _ in range(layers))
        self.codes = nn.ModuleList(Quantise(codes) for _ in range(layers if codes else 0))
        self.norm = nn.LayerNorm(64)
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=size)

    def forward(self, x: Any) -> Any:
        for number, (layer, add) in enumerate(zip(self.layers, self.adds, strict=True)):
            x = add(x + layer(x))
            if self.codes:
                self.codes[number](x)
        return self.norm(x)


class Norm(nn.Module):
    """A norm whose statistics are not kept in FP32: squares, their mean, the division."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.mean, self.out = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x: Any) -> Any:
        mean = self.mean(self.square(x * x).mean(-1, keepdim=True))
        return self.out(x / mean.sqrt())


class Wide(nn.Module):
    """A norm between two others that are sound."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Identity(), Norm(), nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.after(self.norm(self.before(x)))


def seeded(*shape: int, size: float = 1.0, dtype: Any = torch.float16) -> Any:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * size).to(dtype)


# -- residual with large weights ---------------------------------------------------------------------------------------


def test_a_residual_with_large_weights_overflows_fp16() -> None:
    """Each layer makes the stream 9 times larger: 1, 9, 80, 700, 6,000, and in the fifth more than 65,504."""
    torch.manual_seed(0)
    rows = watched(Residual(6, 9 / 8).half(), seeded(32, 64), seeded(32, 64))
    bad = next(row["module"] for row in rows if row["inf_count"] or row["nan_count"])
    result = asked(*rows)
    (origin,) = found(result, "nan-origin")
    assert origin.scope["module"] == bad
    assert bad in ("layers.4", "adds.4", "layers.5")
    assert (evidence(origin)["nan_count"], origin.scope["step"]) == (0, 0)
    assert evidence(origin)["inf_count"] > 0
    assert next(row for row in rows if row["module"] == "norm")["nan_count"] > 0
    assert evidence(origin)["victims_count"] >= 2  # the next sum and the norm at least
    assert "BF16" in origin.recommendation
    assert {"overflow", "near-overflow"} <= set(rules(result))


def test_the_same_residual_is_sound_in_bf16() -> None:
    torch.manual_seed(0)
    result = asked(*watched(Residual(6, 9 / 8).bfloat16(), seeded(32, 64, dtype=torch.bfloat16)))
    assert result.status == "ok"
    assert result.metric("bfloat16_headroom_bits") > 100


def test_a_residual_with_large_weights_is_cut_off_in_int8() -> None:
    """The scale holds four sigma of the first layer; of the second, nine times larger, most does not fit."""
    torch.manual_seed(0)
    result = asked(*watched(Residual(3, 9 / 8, codes=9 * 4 / 127).float(), seeded(32, 64, dtype=torch.float32)))
    named = [finding.scope["module"] for finding in found(result, "int8-saturation")]
    assert named == ["codes.2", "codes.1"]  # the worst first
    assert rules(result) == ["int8-saturation"]
    assert evidence(found(result, "int8-saturation")[1])["saturated_share"] > 0.5


# -- norm of small variance --------------------------------------------------------------------------------------------


def test_a_norm_of_small_variance_is_subnormal_in_fp16() -> None:
    """Squares of numbers about 3e-3 are about 1e-5: below 6.1e-5, the smallest normal number."""
    result = asked(*watched(Wide(), seeded(32, 64, size=3e-3)))
    named = {finding.scope["module"] for finding in found(result, "subnormal-heavy")}
    assert named == {"norm.square", "norm.mean"}
    assert found(result, "nan-origin") == []


def test_squares_that_become_zero_are_an_underflow_and_end_in_inf() -> None:
    """Squares of numbers about 2e-4 are about 4e-8, half a step of FP16 there; the mean of rows is zero for some."""
    result = asked(*watched(Wide(), seeded(256, 4, size=2e-4)))
    assert "norm.square" in {finding.scope["module"] for finding in found(result, "underflow")}
    (origin,) = found(result, "nan-origin")
    assert origin.scope["module"] == "norm.out"
    assert evidence(origin)["victims_count"] == 1  # after


def test_a_norm_of_small_variance_is_zero_in_int8() -> None:
    quantised = nn.Sequential(nn.Identity(), Quantise(0.05))
    result = asked(*watched(quantised, seeded(32, 64, size=0.01, dtype=torch.float32)))
    (finding,) = result.findings
    assert (finding.rule, finding.scope["module"]) == ("underflow", "1")
    assert evidence(finding)["zero_share"] > 0.95
    assert "scale" in finding.recommendation


# -- faults that were put in -------------------------------------------------------------------------------------------


def with_fault(fault: str, dtype: Any, count: int = 4099) -> Any:
    """A tensor of numbers about 1 in which one fault hides, at the very end."""
    values = seeded(count, dtype=torch.float64).clamp(-4, 4)
    largest = torch.finfo(dtype).max
    values[-1] = {"inf": math.inf, "nan": math.nan, "near": largest * 0.9}.get(fault, values[-1])
    if fault == "saturated":
        values[::50] = largest
    return values.to(dtype)


EXPECTED = {"inf": "overflow", "nan": "overflow", "near": "near-overflow", "saturated": "near-overflow"}


#: FP8 tensors are scaled up to the largest number on purpose, and e4m3fn has no infinity.
CASES = [
    (fault, dtype)
    for fault in EXPECTED
    for dtype in FLOATS
    if (fault, dtype) != ("inf", torch.float8_e4m3fn) and not (fault == "near" and dtype.itemsize == 1)
]


@pytest.mark.parametrize(("fault", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "strided", "transposed"])
def test_every_fault_is_found_in_the_right_module(fault: str, dtype: Any, layout: str) -> None:
    tensor = with_fault(fault, dtype)
    if layout == "strided":
        tensor = torch.stack([tensor, with_fault("none", dtype)], -1)[:, 0]
    if layout == "transposed":
        tensor = tensor.view(-1, 4099 // 4099).t()
    sound = with_fault("none", dtype)
    rows = [of_tensor(sound, 0, 0, "a"), of_tensor(tensor, 0, 1, "b"), of_tensor(sound[:0], 0, 2, "empty")]
    result = asked(*rows)
    assert [rule for rule in rules(result) if rule != "nan-origin"] == [EXPECTED[fault]]
    assert {finding.scope["module"] for finding in result.findings} == {"b"}


def test_one_element_of_ten_million_is_found() -> None:
    tensor = torch.ones(10_000_000, dtype=torch.float16)
    tensor[7_654_321] = math.nan
    (origin,) = found(asked(of_tensor(tensor, 0, 0, "a")), "nan-origin")
    assert evidence(origin)["first_bad_element_id"] == 7_654_321
    assert (evidence(origin)["nan_count"], evidence(origin)["inf_count"]) == (1, 0)


@pytest.mark.parametrize(("dtype", "ends"), [("int8", (-128, 127)), ("uint8", (0, 255)), ("int4", (0, 255))])
def test_codes_at_both_ends_are_found_in_integers(dtype: str, ends: tuple[int, int]) -> None:
    kind = torch.int8 if dtype == "int8" else torch.uint8
    codes = torch.full((4096,), 100 if dtype == "uint8" else 0x55, dtype=kind)
    assert asked(of_tensor(codes, 0, 0, "a", dtype)).status == "ok"
    codes[::6], codes[1::6] = ends
    (finding,) = asked(of_tensor(codes, 0, 0, "a", dtype)).findings
    assert finding.rule == "int8-saturation"
    assert evidence(finding)["saturated_share"] == pytest.approx(1 / 3, abs=1e-3)


def test_a_healthy_decoder_raises_nothing() -> None:
    """The reference network's shapes in small: embeddings, norms, products, SwiGLU, residuals, logits."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True, activation="gelu")
    model = nn.Sequential(layer, nn.LayerNorm(64), nn.Linear(64, 512)).half().eval()
    generator = torch.Generator().manual_seed(0)
    result = asked(*watched(model, *(torch.randn(2, 16, 64, generator=generator).half() for _ in range(20))))
    assert (result.status, result.findings) == ("ok", ())
    assert result.metric("float16_headroom_bits") > 8
