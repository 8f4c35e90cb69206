import pytest
import torch

from spikeprof.kernels.fused import (
    rms_norm_residual,
    rms_norm_residual_unfused,
    rotary,
    rotary_table,
    rotary_unfused,
    silu_mul,
    silu_mul_unfused,
)

PRECISION = [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]


def random(*shape, device="cpu", dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(found, exact, most):
    assert found.shape == exact.shape
    assert torch.isfinite(found).all()
    assert torch.isfinite(exact).all()
    assert (found - exact).norm() <= most * exact.norm()


@pytest.mark.parametrize(("dtype", "most"), PRECISION)
@pytest.mark.parametrize("shape", [(3, 5, 300), (1, 1), (2, 4100)])
def test_silu_mul(device_path, shape, dtype, most):
    device, path = device_path
    gate, up = (random(*shape, device=device, dtype=dtype, seed=seed) * 2 for seed in (1, 2))
    fused = silu_mul(gate, up, path=path)
    wide = gate.double()
    assert fused.path == path
    assert fused.out.dtype == dtype
    assert_close(fused.out, wide * wide.sigmoid() * up, most)
    if dtype == torch.float32:
        assert (fused.out - silu_mul_unfused(gate, up).out).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # NumPy's, of the interpreter
def test_silu_mul_by_hand_and_at_the_ends(device_path):
    device, path = device_path
    gate = torch.tensor([0.0, -200.0, 200.0, 1.0], device=device)
    up = torch.tensor([3.0, 2.0, 2.0, 1.0], device=device)
    out = silu_mul(gate, up, path=path).out
    assert out.tolist() == pytest.approx([0.0, 0.0, 400.0, 0.7310585786])


def test_silu_mul_of_the_halves_of_a_projection(device_path):
    device, path = device_path
    both = random(2, 3, 2 * 130, device=device)
    gate, up = both.chunk(2, dim=-1)
    assert not gate.is_contiguous()
    assert_close(silu_mul(gate, up, path=path).out, gate.double() * gate.double().sigmoid() * up, 1e-5)


@pytest.mark.parametrize(
    ("gate", "up", "text"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 5), r"up has shape \[2, 5\], \[2, 4\] is wanted"),
        (torch.zeros(2, 4), torch.zeros(2, 4).half(), "up is torch.float16, gate torch.float32"),
        (torch.zeros(0, 4), torch.zeros(0, 4), r"gate has shape \[0, 4\]: it must have elements"),
        (torch.zeros(4, 2).T, torch.zeros(2, 4), "gate has stride 2 in its last dimension: it must be 1"),
        (torch.zeros(3, 2, 4).transpose(0, 1), torch.zeros(2, 3, 4), "gate has strides .* evenly spaced"),
    ],
)
def test_silu_mul_of_what_does_not_fit(gate, up, text):
    with pytest.raises(ValueError, match=text):
        silu_mul(gate, up)


@pytest.mark.parametrize(("dtype", "most"), PRECISION)
@pytest.mark.parametrize("shape", [(5, 300), (2, 3, 64), (3, 1500), (1, 1)])
def test_rms_norm_residual(device_path, shape, dtype, most):
    device, path = device_path
    x, residual = (random(*shape, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = random(shape[-1], device=device, dtype=dtype, seed=3)
    fused = rms_norm_residual(x, residual, weight, eps=1e-5, path=path)
    total = x.double() + residual.double()
    assert fused.path == path
    assert_close(fused.residual, total, most)
    exact = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert_close(fused.out, exact, most)
    unfused = rms_norm_residual_unfused(x, residual, weight, eps=1e-5)
    if dtype != torch.bfloat16 or path != "interpreter":  # which cuts off where it should round
        assert torch.equal(fused.residual, unfused.residual)
    if dtype == torch.float32:
        assert (fused.out - unfused.out).abs().max() < 1e-5


def test_rms_norm_by_hand(device_path):
    device, path = device_path
    x, residual = torch.tensor([[1.0, 2.0]], device=device), torch.tensor([[2.0, 2.0]], device=device)
    fused = rms_norm_residual(x, residual, torch.tensor([1.0, 10.0], device=device), eps=1e-12, path=path)
    assert fused.residual.tolist() == [[3.0, 4.0]]
    # The mean of 9 and 16 is 12.5.
    assert fused.out[0].tolist() == pytest.approx([3 / 12.5**0.5, 40 / 12.5**0.5])


def test_rms_norm_of_rows_apart(device_path):
    device, path = device_path
    wide = random(4, 200, device=device)
    x, residual = wide[:, :100], wide[:, 100:]
    fused = rms_norm_residual(x, residual, torch.ones(100, device=device), path=path)
    unfused = rms_norm_residual_unfused(x.contiguous(), residual, torch.ones(100, device=device))
    assert (fused.out - unfused.out).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"residual": torch.zeros(3, 4)}, r"residual has shape \[3, 4\], \[2, 4\] is wanted"),
        ({"weight": torch.zeros(5)}, r"weight has shape \[5\], \[4\] is wanted"),
        ({"weight": torch.zeros(4).bfloat16()}, "weight is torch.bfloat16, x torch.float32"),
        ({"eps": 0.0}, "eps is 0.0: it must be above 0"),
        ({"x": torch.zeros(2, 4).long()}, "x is torch.int64: it can be"),
    ],
)
def test_rms_norm_of_what_does_not_fit(change, text):
    good = {"x": torch.zeros(2, 4), "residual": torch.zeros(2, 4), "weight": torch.zeros(4)}
    with pytest.raises(ValueError, match=text):
        rms_norm_residual(**(good | change))


def test_rms_norm_of_rows_too_long():
    with pytest.raises(ValueError, match="x has 65537 elements in its last dimension: 65536 at most"):
        rms_norm_residual(torch.zeros(1, 65537), torch.zeros(1, 65537), torch.zeros(65537))


def turned_in_float64(x, positions):
    half = x.shape[-1] // 2
    angles = positions.double()[:, None] * 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    factors = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * factors
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize(("dtype", "most"), PRECISION)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 3, 32), (5, 1, 80), (40, 2, 64)])
def test_rotary(device_path, heads, kv_heads, head_dim, dtype, most):
    device, path = device_path
    q = random(4, heads, head_dim, device=device, dtype=dtype, seed=1)
    k = random(4, kv_heads, head_dim, device=device, dtype=dtype, seed=2)
    positions = torch.tensor([0, 9000, 3, 9999], device=device)
    table = rotary_table(10_000, head_dim, device=device)
    fused = rotary(q, k, positions, table, path=path)
    assert fused.path == path
    for found, x in ((fused.q, q), (fused.k, k)):
        assert found.dtype == dtype
        assert_close(found.cpu(), turned_in_float64(x.cpu(), positions.cpu()), most)
    unfused = rotary_unfused(q, k, positions, table)
    if dtype == torch.float32:
        assert (fused.q - unfused.q).abs().max() < 1e-5
        assert (fused.k - unfused.k).abs().max() < 1e-5
    assert torch.equal(fused.q[0], q[0])  # position 0 turns nothing


def test_rotary_by_hand(device_path):
    device, path = device_path
    # Two pairs, (0, 2) and (1, 3): at position 1 they turn by 1 and by 0.01 radians.
    q = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]], device=device)
    table = rotary_table(2, 4, device=device)
    out = rotary(q, q, torch.tensor([1], dtype=torch.int32, device=device), table, path=path).q
    assert out.flatten().tolist() == pytest.approx([0.5403023, -0.00999983, 0.8414710, 0.9999500])


def test_rotary_of_parts_of_a_projection(device_path):
    device, path = device_path
    joint = random(3, 8, 16, device=device)
    q, k = joint[:, :4], joint[:, 4:6]
    positions = torch.tensor([5, 1, 0, 7, 2, 9], device=device)[::2]
    table = rotary_table(10, 16, device=device)
    fused, unfused = rotary(q, k, positions, table, path=path), rotary_unfused(q, k, positions, table)
    assert (fused.q - unfused.q).abs().max() < 1e-5
    assert (fused.k - unfused.k).abs().max() < 1e-5


def test_a_position_that_the_table_lacks_is_not_hidden(device_path):
    device, path = device_path
    q = random(3, 2, 16, device=device)
    positions = torch.tensor([0, 10, -1], device=device)
    if path == "torch":
        if device == "cuda":
            pytest.skip("torch's own check ends the process's use of the GPU")
        for wrong, text in ((positions, "-1 to 10"), (positions.clamp_max(9), "-1 to 9"), (positions.abs(), "0 to 10")):
            with pytest.raises(IndexError, match=f"positions reach from {text}: the table has 0 to 9"):
                rotary(q, q, wrong, rotary_table(10, 16), path=path)
        return
    out = rotary(q, q, positions, rotary_table(10, 16, device=device), path=path).q
    assert torch.isfinite(out[0]).all()
    assert out[1:].isnan().all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": torch.zeros(3, 2, 8)}, r"k has shape \[3, 2, 8\], \[2, any, 8\] is wanted"),
        ({"k": torch.zeros(2, 2, 8).half()}, "k is torch.float16, q torch.float32"),
        ({"q": torch.zeros(2, 2, 7), "k": torch.zeros(2, 2, 7)}, "head_dim is 7: an even number is wanted"),
        ({"positions": torch.zeros(3).long()}, r"positions has shape \[3\], \[2\] is wanted"),
        ({"positions": torch.zeros(2)}, "positions is torch.float32: it can be torch.int32, torch.int64"),
        ({"table": torch.zeros(4, 6)}, r"table has shape \[4, 6\], \[any, 8\] is wanted"),
        ({"table": torch.zeros(0, 8)}, "table has no rows"),
        ({"table": torch.zeros(4, 8).double()}, "table is torch.float64: it must be torch.float32"),
    ],
)
def test_rotary_of_what_does_not_fit(change, text):
    good = {"q": torch.zeros(2, 2, 8), "k": torch.zeros(2, 1, 8), "positions": torch.zeros(2).long()}
    with pytest.raises(ValueError, match=text):
        rotary(**(good | {"table": torch.zeros(4, 8)} | change))


def test_tables_that_cannot_be():
    with pytest.raises(ValueError, match="positions_count is 0"):
        rotary_table(0, 8)
    with pytest.raises(ValueError, match="base is -1"):
        rotary_table(1, 8, base=-1)
