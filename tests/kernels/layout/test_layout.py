from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from spikeprof.kernels.layout import nchwc16_to_nhwc, nhwc_to_nchwc16, nhwc_to_nchwc16_naive  # noqa: E402

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 16), (1, 9, 9, 70), (2, 4, 4, 33)]


def expected(x):
    """By index: element [n, c // 16, h, w, c % 16] is element [n, h, w, c]."""
    batch, height, width, channels = x.shape
    out = torch.zeros((batch, -(-channels // 16), height, width, 16), dtype=x.dtype, device=x.device)
    for channel in range(channels):
        out[:, channel // 16, :, :, channel % 16] = x[:, :, :, channel]
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("change", [nhwc_to_nchwc16, nhwc_to_nchwc16_naive])
def test_every_element_arrives_and_the_padding_is_zero(device_path, shape, change):
    device, path = device_path
    x = torch.randn(shape, device=device)
    ran = change(x, path=path)
    assert ran.path == path
    assert torch.equal(ran.out, expected(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back_changes_nothing(device_path, shape):
    device, path = device_path
    x = torch.randn(shape, device=device, dtype=torch.float32).half()
    there = nhwc_to_nchwc16(x, path=path).out
    back = nchwc16_to_nhwc(there, shape[3], path=path)
    assert back.path == path
    assert torch.equal(back.out, x)
    assert back.out.is_contiguous()


def test_what_cannot_be_is_named():
    x = torch.zeros(1, 2, 2, 20)
    with pytest.raises(ValueError, match=r"x has shape \[2, 2\], \[any, any, any, any\] is wanted"):
        nhwc_to_nchwc16(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"x has shape \[0, 2, 2, 20\]: no size may be 0"):
        nhwc_to_nchwc16(x[:0])
    with pytest.raises(ValueError, match=r"x has strides .*: it must be contiguous"):
        nhwc_to_nchwc16_naive(x.transpose(1, 2))
    blocked = nhwc_to_nchwc16(x).out
    with pytest.raises(ValueError, match=r"channels is 33: 2 blocks hold 17 to 32"):
        nchwc16_to_nhwc(blocked, 33)
    with pytest.raises(ValueError, match=r"path is 'triton', but the tensors are on cpu"):
        nhwc_to_nchwc16(x, path="triton")
