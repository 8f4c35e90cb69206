import pytest
import torch

from spikeprof.kernels.fused import linear_silu, linear_silu_unfused


def random(*shape, device="cpu", dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("rows", "ins", "outs"), [
    (1, 40, 70), (33, 100, 200), (130, 64, 150), (300, 30, 1100), (300, 72, 304),
])  # fmt: skip
def test_linear_silu(device_path, rows, ins, outs, dtype, most):
    device, path = device_path
    x = random(rows, ins, device=device, dtype=dtype, seed=1)
    weight = random(outs, ins, device=device, dtype=dtype, seed=2) * ins**-0.5
    bias = random(outs, device=device, dtype=dtype, seed=3)
    fused = linear_silu(x, weight, bias, path=path)
    product = x.double() @ weight.double().T + bias.double()
    exact = product * product.sigmoid()
    assert fused.path == path
    assert (fused.out.shape, fused.out.dtype) == ((rows, outs), dtype)
    assert torch.isfinite(fused.out).all()
    assert (fused.out - exact).norm() <= most * exact.norm()
    if dtype == torch.float32:
        assert (fused.out - linear_silu_unfused(x, weight, bias).out).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("rows", "ins", "outs", "dtype", "taken"),
    [
        (256, 72, 304, torch.float16, True),
        (255, 72, 304, torch.float16, False),
        (256, 72, 304, torch.float32, False),
        (256, 71, 304, torch.float16, False),  # rows of 142 bytes
        (256, 72, 300, torch.bfloat16, False),  # rows of 600 bytes, 16 do not divide them
    ],
)
def test_which_products_are_large(rows, ins, outs, dtype, taken):
    pytest.importorskip("triton")
    from spikeprof.kernels.fused import linear_silu_large_triton

    assert linear_silu_large_triton.takes(random(rows, ins, dtype=dtype), random(outs, ins, dtype=dtype)) is taken


def test_linear_silu_by_hand(device_path):
    device, path = device_path
    x = torch.tensor([[1.0, 2.0]], device=device)
    weight = torch.tensor([[3.0, -1.0], [0.5, 0.25]], device=device)
    bias = torch.tensor([-1.0, 0.0], device=device)
    # Products 1 - 1 = 0 and 1: SiLU of them 0 and the logistic of 1.
    assert linear_silu(x, weight, bias, path=path).out[0].tolist() == pytest.approx([0.0, 0.7310585786])


def test_linear_silu_keeps_leading_dimensions_and_takes_rows_apart(device_path):
    device, path = device_path
    x = random(2, 3, 50, device=device)[..., :40]
    weight, bias = random(7, 60, device=device)[:, :40], random(7, device=device)
    fused = linear_silu(x, weight, bias, path=path)
    assert fused.out.shape == (2, 3, 7)
    assert (fused.out - linear_silu_unfused(x, weight, bias).out).abs().max() < 1e-4  # of sums of some tens


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight": torch.zeros(3, 5)}, r"weight has shape \[3, 5\], \[any, 4\] is wanted"),
        ({"bias": torch.zeros(4)}, r"bias has shape \[4\], \[3\] is wanted"),
        ({"bias": torch.zeros(3).half()}, "bias is torch.float16, x torch.float32"),
        ({"weight": torch.zeros(4, 3).T}, "weight has stride 3 in its last dimension"),
        ({"x": torch.zeros(0, 4)}, r"x has shape \[0, 4\]: it must have elements"),
        ({"x": torch.zeros(2, 4).double()}, "x is torch.float64: it can be"),
        ({"path": "gpu"}, "path is 'gpu'"),
    ],
)
def test_linear_silu_of_what_does_not_fit(change, text):
    good = {"x": torch.zeros(2, 4), "weight": torch.zeros(3, 4), "bias": torch.zeros(3)}
    with pytest.raises(ValueError, match=text):
        linear_silu(**(good | change))
