import pytest
import torch

from spikeprof.kernels.fused import dropout_mask, gelu_dropout, gelu_dropout_unfused
from spikeprof.kernels.fused.dropout import keep_scale, philox, threshold


@pytest.mark.parametrize(
    ("rounds", "wanted"),
    # Known answers that Random123 publishes for a counter and a key of zeros.
    [
        (7, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (10, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ],
)
def test_philox_gives_the_published_words(rounds, wanted):
    words = philox(torch.tensor([0]), 0, rounds)
    assert [word.item() for word in words] == wanted


def test_words_are_32_bits_whatever_counter_and_seed():
    for word in philox(torch.tensor([0, 1, 2**32 - 1, 2**62 + 12345]), 2**63 - 1):
        assert ((word >= 0) & (word < 2**32)).all()
        assert len(set(word.tolist())) == 4


def test_a_mask_depends_on_seed_and_place_alone():
    mask = dropout_mask(5, (1000,), 0.3)
    assert torch.equal(dropout_mask(5, (7, 11), 0.3).flatten(), mask[:77])
    assert not torch.equal(dropout_mask(6, (1000,), 0.3), mask)
    assert not torch.equal(dropout_mask(5 + 2**32, (1000,), 0.3), mask)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_should_be(p):
    count = 400_000
    dropped = (~dropout_mask(11, (count,), p)).sum().item()
    assert abs(dropped - p * count) <= 5 * (p * (1 - p) * count) ** 0.5 + count * 2**-17
    # Neighbours, which share a counter, are dropped together as often as by chance.
    mask = dropout_mask(12, (count // 2, 2), p)
    both = (~mask).all(1).sum().item()
    assert abs(both - p * p * count / 2) <= 5 * (p * p * count / 2) ** 0.5 + count * 2**-16


def test_rounding_of_p_by_hand():
    assert (threshold(0.0), threshold(0.1), threshold(0.5), threshold(0.999999)) == (0, 6554, 32768, 65535)
    assert (keep_scale(0.0), keep_scale(0.5)) == (1.0, 2.0)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("shape", [(3, 1000), (1,), (4096,)])
def test_fused_is_what_the_operators_make(device_path, shape, p):
    device, path = device_path
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(device)
    fused = gelu_dropout(x, p, seed=1234567890123, path=path)
    unfused = gelu_dropout_unfused(x, p, seed=1234567890123)
    assert (fused.path, unfused.path) == (path, "torch")
    assert torch.isfinite(fused.out).all()
    assert (fused.out - unfused.out).abs().max() < 1e-5
    kept = dropout_mask(1234567890123, shape, p, device=device)
    wide = x.double()
    exact = 0.5 * wide * (1 + torch.erf(wide / 2**0.5)) * kept / (1 - threshold(p) / 65536)
    assert (fused.out - exact).norm() <= 1e-5 * exact.norm()
    assert torch.equal(fused.out[~kept], torch.zeros_like(fused.out[~kept]))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_half_precision(device_path, dtype, most):
    device, path = device_path
    x = torch.randn(777, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    out = gelu_dropout(x, 0.2, seed=3, path=path).out
    wide = x.double()
    exact = 0.5 * wide * (1 + torch.erf(wide / 2**0.5)) * dropout_mask(3, (777,), 0.2, device=device) / 0.8
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert (out - exact).norm() <= most * exact.norm()


def test_the_mask_is_the_same_whatever_the_block(device_path):
    device, path = device_path
    if path == "torch":
        pytest.skip("torch has no blocks")
    from spikeprof.kernels.fused.gelu_dropout_triton import gelu_dropout_kernel

    x = torch.randn(3000, generator=torch.Generator().manual_seed(3)).to(device)
    outs = []
    for elements in (256, 2048):
        outs.append(torch.empty_like(x))
        grid = (-(-3000 // elements),)
        gelu_dropout_kernel[grid](x, outs[-1], 3000, 9, threshold(0.4), keep_scale(0.4), ELEMENTS=elements)
    assert torch.equal(*outs)
    assert torch.equal(outs[0], gelu_dropout(x, 0.4, seed=9, path=path).out)


def test_gelu_from_end_to_end(device_path):
    device, path = device_path
    x = torch.linspace(-12, 12, 5001, device=device)
    wide = x.double()
    exact = 0.5 * wide * torch.erfc(-wide / 2**0.5)
    assert (gelu_dropout(x, 0.0, seed=0, path=path).out - exact).abs().max() < 1e-6
    far = torch.tensor([-1e4, 0.0, 1e4], device=device)
    assert gelu_dropout(far, 0.0, seed=0, path=path).out.tolist() == pytest.approx([0.0, 0.0, 1e4], abs=1e-7)


def test_a_dropped_nan_stays_visible(device_path):
    device, path = device_path
    x = torch.full((64,), float("nan"), device=device)
    assert gelu_dropout(x, 0.5, seed=0, path=path).out.isnan().all()


def test_without_a_seed_torch_drops():
    x = torch.ones(1000)
    kept = gelu_dropout_unfused(x, 0.5).out != 0
    assert 350 < kept.sum() < 650


@pytest.mark.parametrize(
    ("x", "p", "seed", "text"),
    [
        (torch.zeros(4), 1.0, 0, "p is 1.0: it must be at least 0 and below 1"),
        (torch.zeros(4), 0.5, -1, "seed is -1: it must be at least 0"),
        (torch.zeros(4), 0.5, 1.5, "seed is 1.5: it must be at least 0 and below 2\\^63, and whole"),
        (torch.zeros(4), 0.5, 2**63, "it must be at least 0 and below 2"),
        (torch.zeros(0), 0.5, 0, r"x has shape \[0\]: it must have elements"),
        (torch.zeros(4, dtype=torch.int32), 0.5, 0, "x is torch.int32: it can be torch.float16"),
        (torch.zeros(4, 4).T[:2], 0.5, 0, r"x has strides \[1, 4\]: it must be contiguous"),
    ],
)
def test_arguments_that_cannot_be(x, p, seed, text):
    with pytest.raises(ValueError, match=text):
        gelu_dropout(x, p, seed=seed)
