"""Putting parts together."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from spikeprof.kernels.attention import merge_attended, reference_attention, tiled_attention  # noqa: E402
from spikeprof.kernels.paths import Attended  # noqa: E402


def part(out, lse, path="torch", dtype=torch.float32):
    """One query of one head, two channels."""
    return Attended(torch.tensor([[out]], dtype=dtype), torch.tensor([[lse]]), path)


def test_parts_weigh_their_sums():
    """Sums of 1 and 3: the output is a quarter and three quarters, the sum of both is 4."""
    got = merge_attended([part([4.0, 0.0], 0.0), part([0.0, 8.0], math.log(3), "triton")])
    assert got.out[0, 0].tolist() == pytest.approx([1.0, 6.0])
    assert got.lse.item() == pytest.approx(math.log(4))
    assert got.path == "torch+triton"


def test_empty_parts():
    """A part that saw nothing changes nothing; where all saw nothing the rest is 0 and -inf."""
    nothing = part([0.0, 0.0], -math.inf)
    one = merge_attended([nothing, part([4.0, 2.0], 100.0, dtype=torch.float32)])
    assert one.out[0, 0].tolist() == [4.0, 2.0]
    assert one.lse.item() == 100.0
    none = merge_attended([nothing, nothing])
    assert none.out[0, 0].tolist() == [0.0, 0.0]
    assert none.lse.item() == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_keys_in_two_parts(device_path, agree, dtype):
    device, path = device_path
    q, k, v = (
        torch.randn(2, 2, n, 16, generator=torch.Generator().manual_seed(n)).to(device, dtype) for n in (9, 70, 71)
    )
    v = v[:, :, :70]
    pieces = [tiled_attention(q, k[:, :, s], v[:, :, s], causal=False, path=path) for s in (slice(33), slice(33, 70))]
    got = merge_attended(pieces)
    agree(got, reference_attention(q, k, v, causal=False))
    assert got.out.dtype == dtype
    assert got.path == path


def test_errors():
    with pytest.raises(ValueError, match="parts is empty: at least one is wanted"):
        merge_attended([])
    with pytest.raises(ValueError, match=r"parts\[1\].out has shape \[1, 1, 3\], \[1, 1, 2\] is wanted"):
        merge_attended([part([1.0, 2.0], 0.0), part([1.0, 2.0, 3.0], 0.0)])
    with pytest.raises(ValueError, match=r"parts\[1\].out is torch.float16, parts\[0\].out torch.float32"):
        merge_attended([part([1.0, 2.0], 0.0), part([1.0, 2.0], 0.0, dtype=torch.float16)])
