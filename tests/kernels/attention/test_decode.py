"""Decode over a contiguous cache, against float64 attention of each sequence by itself."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from spikeprof.kernels.attention import decode_attention, reference_attention  # noqa: E402
from spikeprof.kernels.attention.decode import chosen_splits  # noqa: E402
from spikeprof.kernels.paths import Attended  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def made(batch, heads, kv_heads, capacity, head_dim, *, dtype=torch.float32, device="cpu"):
    """Random q, k and v."""
    source = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, head_dim), (batch, kv_heads, capacity, head_dim), (batch, kv_heads, capacity, head_dim))
    return [torch.randn(shape, generator=source, dtype=torch.float32).to(device, dtype) for shape in shapes]


def reference(q, k, v, lengths, window=None, scale=None):
    """Each sequence by itself, in float64."""
    outs, lses = [], []
    for i, length in enumerate(lengths.tolist()):
        if length == 0:
            outs.append(torch.zeros_like(q[i], dtype=torch.float64))
            lses.append(torch.full_like(q[i, :, 0], -math.inf, dtype=torch.float64))
            continue
        k_seen, v_seen = k[i, None, :, :length], v[i, None, :, :length]
        got = reference_attention(q[i, None, :, None], k_seen, v_seen, window=window, scale=scale)
        outs.append(got.out[0, :, 0])
        lses.append(got.lse[0, :, 0])
    return Attended(torch.stack(outs), torch.stack(lses), "torch")


def counts(values, device="cpu"):
    """int32 lengths."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_worked_by_hand(device_path):
    """Scores 0 and ln 3 weigh a quarter and three quarters; the third token is not valid."""
    device, path = device_path
    q, k, v = torch.zeros(1, 1, 16), torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3, 16)
    q[..., 0], k[0, 0, 1, 0] = 1.0, math.log(3)
    v[0, 0, :, 15] = torch.tensor([4.0, 8.0, 1000.0])
    got = decode_attention(q.to(device), k.to(device), v.to(device), counts([2], device), scale=1.0, path=path)
    assert got.out[0, 0, 15].item() == pytest.approx(7.0)
    assert got.out[0, 0, :15].abs().max() == 0
    assert got.lse.item() == pytest.approx(math.log(4))
    assert got.path == path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3, None])
def test_unequal_lengths(device_path, agree, dtype, splits):
    """Down to one token and none at all, in one part or several."""
    device, path = device_path
    q, k, v = made(5, 4, 2, 300, 32, dtype=dtype, device=device)
    lengths = counts([300, 0, 1, 129, 64], device)
    got = decode_attention(q, k, v, lengths, splits=splits, path=path)
    agree(got, reference(q, k, v, lengths))
    assert got.lse[1].tolist() == [-math.inf] * 4
    assert bool((got.out[1] == 0).all())


def test_splits_agree(device_path):
    device, path = device_path
    q, k, v = made(2, 4, 2, 300, 32, device=device)
    lengths = counts([300, 77], device)
    one, three, auto = (decode_attention(q, k, v, lengths, splits=s, path=path) for s in (1, 3, None))
    for other in (three, auto):
        assert torch.allclose(one.out, other.out, atol=1e-6, rtol=1e-5)
        assert torch.allclose(one.lse, other.lse, atol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 144, 256])
def test_head_dims(device_path, agree, head_dim):
    device, path = device_path
    for dtype in (torch.float32, torch.float16):
        q, k, v = made(1, 2, 1, 70, head_dim, dtype=dtype, device=device)
        lengths = counts([69], device)
        agree(decode_attention(q, k, v, lengths, splits=2, path=path), reference(q, k, v, lengths))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (20, 1)], ids=["one each", "grouped", "one for all"])
def test_heads_share_keys(device_path, agree, heads, kv_heads):
    """20 heads for one are more than the 16 rows of the smallest product."""
    device, path = device_path
    q, k, v = made(2, heads, kv_heads, 50, 16, device=device)
    lengths = counts([50, 33], device)
    agree(decode_attention(q, k, v, lengths, path=path), reference(q, k, v, lengths))


@pytest.mark.parametrize("window", [1, 50, 100, 1000, 2**40, 2**70])
def test_window(device_path, agree, window):
    device, path = device_path
    q, k, v = made(4, 2, 1, 200, 16, device=device)
    lengths = counts([200, 0, 1, 99], device)
    for splits in (1, 3):
        got = decode_attention(q, k, v, lengths, window=window, splits=splits, path=path)
        agree(got, reference(q, k, v, lengths, window=min(window, 1000)))


def test_what_is_not_valid_does_not_leak(device_path, agree):
    device, path = device_path
    q, k, v = made(2, 2, 1, 90, 16, device=device)
    lengths = counts([70, 5], device)
    want = reference(q, k, v, lengths)
    for i, length in enumerate([70, 5]):
        k[i, :, length:], v[i, :, length:] = torch.nan, torch.nan
    agree(decode_attention(q, k, v, lengths, splits=2, path=path), want)


def test_views_are_taken_as_they_are(device_path, agree):
    """One layer of a cache of several; queries out of a joined projection."""
    device, path = device_path
    q, k, v = made(2, 6, 4, 40, 16, device=device)
    q, k, v, lengths = q[:, 1:5], k[:, ::2], v[:, 2:], counts([40, 21], device)
    agree(decode_attention(q, k, v, lengths, path=path), reference(q, k, v, lengths))


def test_splits_are_chosen_by_shapes():
    """2 programs on each of 132 multiprocessors are wanted, of 128 tokens or more."""
    assert chosen_splits(1, 8, 8192) == 33
    assert chosen_splits(1, 8, 1024) == 8
    assert chosen_splits(32, 8, 8192) == 2
    assert chosen_splits(64, 8, 8192) == 1
    assert chosen_splits(1, 1, 50) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": torch.zeros(2, 4, 1, 32)}, r"q has shape \[2, 4, 1, 32\], \[any, any, any\] is wanted"),
        ({"q": torch.zeros(0, 4, 32)}, r"q has shape \[0, 4, 32\]: every size must be at least 1"),
        ({"q": torch.zeros(2, 3, 32)}, "q has 3 heads: they must be a multiple of the 2 key-value heads"),
        ({"q": torch.zeros(2, 4, 40)}, "head_dim is 40"),
        ({"k": torch.zeros(3, 2, 9, 32)}, r"k has shape \[3, 2, 9, 32\], \[2, any, any, 32\] is wanted"),
        ({"v": torch.zeros(2, 2, 9, 32).half()}, "v is torch.float16, q torch.float32"),
        ({"lengths": counts([9])}, r"lengths has shape \[1\], \[2\] is wanted"),
        ({"lengths": counts([9, 9]).long()}, "lengths is torch.int64: it must be torch.int32"),
        ({"lengths": counts([3, 10])}, "lengths reach from 3 to 10: they can be 0 to 9, the capacity"),
        ({"lengths": counts([-1, 3])}, "lengths reach from -1 to 3: they can be 0 to 9"),
        ({"splits": 0}, "splits is 0: it must be a whole number of at least 1, or None to choose"),
        ({"window": -2}, "window is -2: it must be a whole number of at least 1 key"),
        ({"window": 2.5}, "window is 2.5: it must be a whole number"),
        ({"splits": 1.5}, "splits is 1.5: it must be a whole number"),
        ({"scale": 0.0}, "scale is 0.0: it must be finite and greater than 0"),
        ({"path": "gpu"}, "path is 'gpu'"),
    ],
)
def test_errors(wrong, message):
    right = {
        "q": torch.zeros(2, 4, 32),
        "k": torch.zeros(2, 2, 9, 32),
        "v": torch.zeros(2, 2, 9, 32),
        "lengths": counts([9, 4]),
    }
    with pytest.raises(ValueError, match=message):
        decode_attention(**(right | wrong))
