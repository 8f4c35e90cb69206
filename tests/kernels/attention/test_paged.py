"""Decode over a paged cache, plain and quantised, against float64 attention of the tokens put back in order."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from spikeprof.kernels.attention import paged_attention, reference_attention  # noqa: E402
from spikeprof.kernels.cache.pages import Pages, Quantised  # noqa: E402
from spikeprof.kernels.paths import Attended  # noqa: E402

LENGTHS = [105, 0, 1, 37]
BATCH, HEADS, KV_HEADS = len(LENGTHS), 4, 2
POISON = 1 << 30
LSE_ALLOWED = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of keys rounded to that


def quantised(x, bits, channels=32):
    """``x`` [..., head_dim] by rows (8 bits) or groups of channels (4 bits), least to 0, greatest to the top."""
    span = x.shape[-1] if bits == 8 else min(channels, x.shape[-1])
    grouped = x.float().unflatten(-1, (-1, span))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-6).half()
    zero = (-low / scale.float()).half()
    whole = torch.round(grouped / scale.float()[..., None] + zero.float()[..., None])
    whole = whole.clamp(0, 2**bits - 1).to(torch.uint8).flatten(-2)
    if bits == 4:
        whole = whole[..., ::2] | (whole[..., 1::2] << 4)
    return Quantised(whole.contiguous(), scale, zero, bits)


def restored(stored):
    """float64 [..., head_dim]."""
    if isinstance(stored, torch.Tensor):
        return stored.double()
    whole = stored.values
    if stored.bits == 4:
        whole = torch.stack((whole & 15, whole >> 4), -1).flatten(-2)
    grouped = whole.double().unflatten(-1, (stored.scale.shape[-1], -1))
    return ((grouped - stored.zero.double()[..., None]) * stored.scale.double()[..., None]).flatten(-2)


def made(*, head_dim=32, page_size=16, dtype=torch.float32, device="cpu", key_bits=16, value_bits=16, spoil=False):
    """q and the pages of LENGTHS tokens: random pages out of a pool with some to spare, the table's rest poisoned."""
    source = torch.Generator().manual_seed(0)
    most = max(LENGTHS) // page_size + 3
    used = [-(-length // page_size) for length in LENGTHS]
    pool = sum(used) + 4
    order = torch.randperm(pool, generator=source).tolist()
    table = torch.full((BATCH, most), POISON, dtype=torch.int32)
    for i, count in enumerate(used):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
    shape = (pool, KV_HEADS, page_size, head_dim)
    stored = [torch.randn(shape, generator=source).to(dtype) for _ in range(2)]
    stored = [x if bits == 16 else quantised(x, bits) for x, bits in zip(stored, (key_bits, value_bits), strict=True)]
    if spoil:
        stored = [_spoilt(x, table, used, page_size) for x in stored]
    keys, values = (_moved(x, device) for x in stored)
    q = torch.randn(BATCH, HEADS, head_dim, generator=source).to(device, dtype)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    return q, Pages(keys, values, table.to(device), lengths, head_dim)


def _spoilt(stored, table, used, page_size):
    """NaN wherever no valid token lies."""
    plain = isinstance(stored, torch.Tensor)
    for part in (stored,) if plain else (stored.scale, stored.zero):
        valid = torch.zeros(part.shape[0], page_size, dtype=torch.bool)
        for i, length in enumerate(LENGTHS):
            for n in range(used[i]):
                valid[table[i, n], : length - n * page_size] = True
        part.masked_fill_(~valid[:, None, :, None], torch.nan)
    return stored


def _moved(stored, device):
    if isinstance(stored, torch.Tensor):
        return stored.to(device)
    return Quantised(stored.values.to(device), stored.scale.to(device), stored.zero.to(device), stored.bits)


def reference(q, pages, window=None, keys=None):
    """Each sequence by itself in float64, its tokens put in order; ``keys`` stands in for the stored ones."""
    keys, values = restored(pages.keys if keys is None else keys), restored(pages.values)
    outs, lses = [], []
    for i, length in enumerate(LENGTHS):
        rows = pages.block_table[i, : -(-length // pages.page_size)].long()
        k, v = (x[rows].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (keys, values))
        if length == 0:
            outs.append(torch.zeros_like(q[i], dtype=torch.float64))
            lses.append(torch.full_like(q[i, :, 0], -math.inf, dtype=torch.float64))
            continue
        outs_i, lse_i = _attended(q[i].double(), k[0], v[0], window)
        outs.append(outs_i)
        lses.append(lse_i)
    return Attended(torch.stack(outs), torch.stack(lses), "torch")


def _attended(q, k, v, window):
    """One query [heads, head_dim] in float64, where reference_attention takes no float64 keys."""
    if window is not None:
        k, v = k[:, -window:], v[:, -window:]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    scores = (q[:, None] * k).sum(-1) * q.shape[-1] ** -0.5
    return (torch.softmax(scores, -1)[..., None] * v).sum(1), torch.logsumexp(scores, -1)


def test_reference_agrees():
    """The reference here and that of prefill are one."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, length, 16, generator=source) for n, length in ((HEADS, 1), (KV_HEADS, 9), (KV_HEADS, 9)))
    want = reference_attention(q[None], k[None], v[None])
    out, lse = _attended(q[:, 0].double(), k.double(), v.double(), None)
    assert torch.allclose(out, want.out[0, :, 0])
    assert torch.allclose(lse, want.lse[0, :, 0])


@pytest.mark.parametrize(
    ("page_size", "dtype"),
    [(16, torch.float32), (32, torch.float32), (16, torch.float16), (32, torch.bfloat16)],
    ids=str,
)
def test_plain(device_path, agree, page_size, dtype):
    device, path = device_path
    q, pages = made(page_size=page_size, dtype=dtype, device=device, spoil=True)
    want = reference(q, pages)
    for splits in (1, 3, None):
        got = paged_attention(q, pages, splits=splits, path=path)
        agree(got, want)
        assert got.path == path


@pytest.mark.parametrize(
    ("key_bits", "value_bits", "dtype"),
    [
        *((8, 8, dtype) for dtype in LSE_ALLOWED),
        *((4, 4, dtype) for dtype in LSE_ALLOWED),
        (8, 16, torch.float16),
        (16, 8, torch.bfloat16),
        (4, 16, torch.float32),
        (8, 4, torch.float16),
    ],
    ids=str,
)
def test_quantised(device_path, agree, key_bits, value_bits, dtype):
    """Against what is stored, dequantised in float64: the kernel rounds that to q's dtype, and no more."""
    device, path = device_path
    q, pages = made(
        head_dim=64, dtype=dtype, device=device, key_bits=key_bits, value_bits=value_bits, spoil=True, page_size=32
    )
    want = reference(q, pages)
    agree(paged_attention(q, pages, splits=2, path=path), want, lse_allowed=LSE_ALLOWED[dtype])


@pytest.mark.parametrize("head_dim", [16, 80, 96, 256])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_head_dims(device_path, agree, head_dim, bits):
    """4 bits of 80 channels have 5 groups of 16; of 96, 3 groups of 32: halves of 40 and 48 columns in tiles of 64."""
    device, path = device_path
    q, pages = made(head_dim=head_dim, device=device)
    if bits < 16:
        stored = (quantised(x.cpu(), bits, 16 if head_dim == 80 else 32) for x in (pages.keys, pages.values))
        keys, values = (_moved(x, device) for x in stored)
        pages = Pages(keys, values, pages.block_table, pages.lengths, head_dim)
    agree(paged_attention(q, pages, splits=2, path=path), reference(q, pages))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("window", [1, 20, 80])
def test_window(device_path, agree, bits, window):
    device, path = device_path
    q, pages = made(device=device, key_bits=bits, value_bits=bits)
    want = reference(q, pages, window)
    agree(paged_attention(q, pages, window=window, splits=3, path=path), want)


def test_int8_keys_are_within_a_percent(device_path, agree):
    """Keys of unit variance, in 8 bits, against the same keys as they were."""
    device, path = device_path
    q, plain = made(head_dim=128, dtype=torch.float16, device=device)
    keys = _moved(quantised(plain.keys.cpu(), 8), device)
    pages = Pages(keys, plain.values, plain.block_table, plain.lengths, 128)
    got, want = paged_attention(q, pages, path=path), reference(q, plain)
    assert bool(got.out.isfinite().all())
    assert torch.linalg.norm(got.out.double() - want.out) <= 0.01 * torch.linalg.norm(want.out)


def test_by_hand(device_path):
    """4 bits: byte 0x5A is 10 in the even channel, 5 in the odd; less zero 4, times 2: 12 and 2."""
    device, path = device_path
    values = torch.full((1, 1, 16, 16), 0x5A, dtype=torch.uint8)
    scale, zero = torch.full((1, 1, 16, 1), 2.0).half(), torch.full((1, 1, 16, 1), 4.0).half()
    stored = _moved(Quantised(values, scale, zero, 4), device)
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0]], [3]))
    q = torch.zeros(1, 1, 32, device=device)
    q[0, 0, :2] = torch.tensor([1.0, 10.0])
    got = paged_attention(q, Pages(stored, stored, table, lengths, 32), scale=0.5, path=path)
    assert got.out[0, 0].tolist() == [12.0, 2.0] * 16
    assert got.lse.item() == pytest.approx(0.5 * (12 + 20) + math.log(3))


def test_one_layer_of_a_pool(device_path, agree):
    """Pages of all layers in one tensor: a layer's are a view, and are read as one."""
    device, path = device_path
    q, pages = made(device=device, key_bits=8)

    def view(x):
        return torch.stack((torch.zeros_like(x), x), 1)[:, 1]

    keys = Quantised(view(pages.keys.values), view(pages.keys.scale), view(pages.keys.zero), 8)
    layer = Pages(keys, view(pages.values), pages.block_table, pages.lengths, pages.head_dim)
    assert not layer.values.is_contiguous()
    agree(paged_attention(q, layer, path=path), reference(q, pages))


def changed(pages, **fields):
    """The pages with some fields replaced."""
    names = ("keys", "values", "block_table", "lengths", "head_dim")
    return Pages(**({name: getattr(pages, name) for name in names} | fields))


def test_errors():
    q, pages = made()
    eight, four = quantised(pages.keys, 8), quantised(pages.keys, 4)
    table = pages.block_table
    pool = pages.keys.shape[0]

    def refused(message, error=ValueError, queries=q, **fields):
        with pytest.raises(error, match=message):
            paged_attention(queries, changed(pages, **fields))

    refused("pages.head_dim is 64, q has 32", head_dim=64)
    refused("q has 3 heads: they must be a multiple of the 2", queries=q[:, :3])
    refused(r"pages.values has shape \[.*, 8, 32\], \[.*, 2, 16, 32\] is wanted", values=pages.values[:, :, :8])
    refused("pages.keys is torch.float16, q torch.float32", keys=pages.keys.half())
    refused("pages.block_table is torch.int64: it must be torch.int32", block_table=table.long())
    refused(r"pages.block_table has shape \[1, .*\], \[4, any\] is wanted", block_table=table[:1])
    refused("pages.lengths reach from 0 to 105: they can be 0 to 16, what the block table", block_table=table[:, :1])
    bad = table.clone()
    bad[0, 1] = pool
    refused(rf"pages.block_table\[0, 1\] is {pool}: the pages are 0 to {pool - 1}", IndexError, block_table=bad)
    bad[0, 1] = -1
    refused(r"pages.block_table\[0, 1\] is -1", IndexError, block_table=bad)
    refused("pages.keys.bits is 2: it can be 4 or 8", keys=Quantised(eight.values, eight.scale, eight.zero, 2))
    refused(r"pages.keys.values has shape .* is wanted", keys=Quantised(eight.values, eight.scale, eight.zero, 4))
    whole = Quantised(eight.values.to(torch.int8), eight.scale, eight.zero, 8)
    refused("pages.keys.values is torch.int8: it must be torch.uint8", keys=whole)
    wide = Quantised(eight.values, eight.scale.float(), eight.zero.float(), 8)
    refused("pages.keys.scale is torch.float32: it must be torch.float16", keys=wide)
    three = Quantised(four.values, *(x.expand(-1, -1, -1, 3).contiguous() for x in (four.scale, four.zero)), 4)
    refused("pages.keys.scale has 3 groups for 32 channels: for 4 bits", keys=three)
    two = Quantised(eight.values, *(x.expand(-1, -1, -1, 2).contiguous() for x in (eight.scale, eight.zero)), 8)
    refused("pages.keys.scale has 2 groups for 32 channels: for 8 bits it must be 1", keys=two)
    apart = Quantised(eight.values, eight.scale, eight.zero.transpose(1, 2).contiguous().transpose(1, 2), 8)
    refused("pages.keys.scale and pages.keys.zero have strides", keys=apart)
