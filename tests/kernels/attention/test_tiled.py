"""Prefill: naive and tiled attention against float64, and what they refuse."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from spikeprof.kernels.attention import naive_attention, reference_attention, tiled_attention  # noqa: E402
from spikeprof.kernels.attention.masks import key_range, visible  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAIVE_LSE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}  # of scores rounded to the dtype


def made(batch, heads, kv_heads, q_len, k_len, head_dim, *, dtype=torch.float32, device="cpu", seed=0):
    """Random q, k and v."""
    source = torch.Generator().manual_seed(seed)
    shapes = ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len))
    return [
        torch.randn(batch, n, length, head_dim, generator=source, dtype=torch.float32).to(device, dtype)
        for n, length in shapes
    ]


def test_worked_by_hand(device_path):
    """Scores 0, ln 2 and ln 3: the first query sees two keys, 1 and 2 thirds; the last all, 1, 2 and 3 sixths."""
    device, path = device_path
    q, k, v = torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3, 16)
    q[..., 0] = 1.0
    k[0, 0, :, 0] = torch.tensor([0.0, math.log(2), math.log(3)])
    v[0, 0, :, 0] = torch.tensor([6.0, 12.0, 18.0])
    for attention in (tiled_attention, naive_attention, reference_attention):
        how = {"path": path} if attention is tiled_attention else {}
        got = attention(q.to(device), k.to(device), v.to(device), scale=1.0, **how)
        assert got.out[0, 0, :, 0].tolist() == pytest.approx([10.0, 14.0], rel=1e-6)
        assert got.out[0, 0, :, 1:].abs().max() == 0
        assert got.lse[0, 0].tolist() == pytest.approx([math.log(3), math.log(6)], rel=1e-6)
        assert got.path == (path if attention is tiled_attention else "torch")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_dtypes(device_path, agree, dtype, causal):
    device, path = device_path
    q, k, v = made(2, 4, 2, 133, 197, 32, dtype=dtype, device=device)
    want = reference_attention(q, k, v, causal=causal)
    agree(tiled_attention(q, k, v, causal=causal, path=path), want)
    agree(naive_attention(q, k, v, causal=causal), want, lse_allowed=NAIVE_LSE[dtype])


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 144, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_head_dims(device_path, agree, head_dim, dtype):
    device, path = device_path
    q, k, v = made(1, 2, 1, 70, 70, head_dim, dtype=dtype, device=device)
    agree(tiled_attention(q, k, v, path=path), reference_attention(q, k, v))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (5, 1)], ids=["one each", "grouped", "one for all"])
def test_heads_share_keys(device_path, agree, heads, kv_heads):
    device, path = device_path
    q, k, v = made(2, heads, kv_heads, 37, 53, 16, device=device)
    agree(tiled_attention(q, k, v, path=path), reference_attention(q, k, v))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 200), (64, 64), (128, 256), (130, 131), (200, 1)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_lengths(device_path, agree, lengths, causal):
    device, path = device_path
    q, k, v = made(1, 2, 1, *lengths, 16, device=device)
    agree(tiled_attention(q, k, v, causal=causal, path=path), reference_attention(q, k, v, causal=causal))


@pytest.mark.parametrize("window", [1, 7, 64, 100, 1000, 2**40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_window(device_path, agree, window, dtype):
    device, path = device_path
    q, k, v = made(1, 2, 1, 200, 260, 16, dtype=dtype, device=device)
    want = reference_attention(q, k, v, window=window)
    agree(tiled_attention(q, k, v, window=window, path=path), want)
    agree(naive_attention(q, k, v, window=window), want, lse_allowed=NAIVE_LSE[dtype])
    if window == 1:
        assert torch.equal(want.out, v[:, :, 60:].double().expand(1, 2, -1, -1))


def test_queries_that_see_nothing(device_path, agree):
    """With 100 queries on 30 keys the first 70 stand before the first key."""
    device, path = device_path
    for window in (None, 5):
        q, k, v = made(1, 2, 1, 100, 30, 16, device=device)
        want = reference_attention(q, k, v, window=window)
        assert (want.lse == -torch.inf).sum() == 2 * 70
        agree(tiled_attention(q, k, v, window=window, path=path), want)
        agree(naive_attention(q, k, v, window=window), want)


@pytest.mark.parametrize("lengths", [(1100, 1300), (600, 1500)], ids=str)
def test_many_tiles_of_plain_torch(agree, lengths):
    q, k, v = made(1, 2, 1, *lengths, 16)
    for window in (None, 300, 700):
        agree(tiled_attention(q, k, v, window=window, path="torch"), reference_attention(q, k, v, window=window))


def test_plain_torch_makes_no_more_than_tiles():
    """Of 3000 queries and keys nothing larger is made than the tensors themselves, or one tile of scores."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made_here = func(*args, **(kwargs or {}))
            if isinstance(made_here, torch.Tensor):
                self.numbers = max(self.numbers, made_here.numel())
            return made_here

    q, k, v = made(1, 1, 1, 3000, 3000, 16)
    with Largest() as largest:
        tiled_attention(q, k, v, path="torch")
    assert largest.numbers == 512 * 512


def test_many_heads_in_sections(device_path, agree, monkeypatch):
    """Sections of 2 heads, of which the last is short, make the same."""
    device, path = device_path
    if path != "torch":
        from spikeprof.kernels.attention import tiled_triton

        monkeypatch.setattr(tiled_triton, "_L2_BYTES", 2 * 2 * 100 * 16 * 4)
    q, k, v = made(1, 5, 5, 150, 100, 16, device=device)
    agree(tiled_attention(q, k, v, causal=False, path=path), reference_attention(q, k, v, causal=False))


def test_large_scores_do_not_overflow(device_path, agree):
    device, path = device_path
    q, k, v = made(1, 1, 1, 40, 70, 16, device=device)
    agree(tiled_attention(q * 1000, k, v, path=path), reference_attention(q * 1000, k, v), 1e-3, 1e-2)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_keys_that_nobody_sees_do_not_leak(device_path):
    """Tiles past the masks are not read; NaN in a key that is seen does come out."""
    device, path = device_path
    q, k, v = made(1, 1, 1, 300, 300, 16, device=device)
    first = tiled_attention(q, k, v, path=path).out[:, :, :128]
    k[:, :, 200:], v[:, :, 200:] = torch.nan, torch.nan
    spoilt = tiled_attention(q, k, v, path=path)
    if path != "torch":
        assert torch.equal(spoilt.out[:, :, :128], first)
    assert bool(spoilt.out[:, :, 200:].isnan().all())
    assert bool(spoilt.lse[:, :, 200:].isnan().all())


def test_views_are_taken_as_they_are(device_path, agree):
    """Queries, keys and values as they come from one projection; the output lies in memory as the queries do."""
    device, path = device_path
    joined = torch.randn(2, 50, 4 + 2 + 2, 16, generator=torch.Generator().manual_seed(1)).to(device)
    q, k, v = (part.transpose(1, 2) for part in joined.split([4, 2, 2], 2))
    got = tiled_attention(q, k, v, path=path)
    agree(got, reference_attention(q, k, v))
    assert got.out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": torch.zeros(2, 16)}, r"q has shape \[2, 16\], \[any, any, any, any\] is wanted"),
        ({"q": torch.zeros(0, 4, 3, 32)}, r"q has shape \[0, 4, 3, 32\]: every size must be at least 1"),
        ({"q": torch.zeros(2, 4, 3, 32).double()}, "q is torch.float64: it can be torch.float16"),
        ({"q": torch.zeros(2, 3, 3, 32)}, "q has 3 heads: they must be a multiple of the 2 key-value heads"),
        ({"q": torch.zeros(2, 4, 3, 24)}, "head_dim is 24: it must be a multiple of 16 from 16 to 256"),
        ({"q": torch.zeros(2, 4, 3, 272)}, "head_dim is 272: it must be"),
        ({"q": torch.zeros(2, 4, 32, 3).transpose(2, 3)}, "q has stride 3 in its last dimension"),
        ({"k": torch.zeros(1, 2, 5, 32)}, r"k has shape \[1, 2, 5, 32\], \[2, any, any, 32\] is wanted"),
        ({"k": torch.zeros(2, 2, 5, 32).half()}, "k is torch.float16, q torch.float32"),
        ({"k": torch.zeros(2, 2, 5, 32, device="meta")}, "k is on meta, q on cpu"),
        ({"v": torch.zeros(2, 2, 6, 32)}, r"v has shape \[2, 2, 6, 32\], \[2, 2, 5, 32\] is wanted"),
        ({"k": torch.zeros(2, 2, 0, 32), "v": torch.zeros(2, 2, 0, 32)}, "k has shape .* at least 1"),
        ({"window": 0}, "window is 0: it must be a whole number of at least 1 key, or None"),
        ({"window": 4, "causal": False}, "window is 4 with causal=False"),
        ({"scale": -1.0}, "scale is -1.0: it must be finite and greater than 0"),
        ({"scale": math.nan}, "scale is nan"),
        ({"path": "fast"}, "path is 'fast': it can be auto, triton, interpreter, torch"),
    ],
)
def test_errors(wrong, message):
    right = {"q": torch.zeros(2, 4, 3, 32), "k": torch.zeros(2, 2, 5, 32), "v": torch.zeros(2, 2, 5, 32)}
    with pytest.raises(ValueError, match=message):
        tiled_attention(**(right | wrong))
    if "path" not in wrong:
        with pytest.raises(ValueError, match=message):
            naive_attention(**(right | wrong))


def test_masks():
    """Positions 2 to 4 of 5 keys: the window of 2 begins at key 1; what all see needs no mask."""
    cpu = torch.device("cpu")
    assert key_range(range(2, 5), 5, True, 2) == range(1, 5)
    assert key_range(range(2, 5), 5, True, None) == range(5)
    assert key_range(range(2, 3), 5, False, None) == range(5)
    assert key_range(range(-4, -1), 5, True, None) == range(0)
    assert visible(range(2, 5), range(3), True, None, cpu) is None
    assert visible(range(2, 4), range(2, 4), True, 2, cpu).tolist() == [[True, False], [True, True]]
    assert visible(range(2, 4), range(1, 3), True, 2, cpu).tolist() == [[True, True], [False, True]]
