import warnings

import pytest
import torch

from spikeprof.kernels.cache import Quantised, dequantise, quantise
from spikeprof.kernels.cache.append import append
from spikeprof.kernels.cache.quant import pack, unpack
from spikeprof.kernels.cache.store import Store


def test_eight_bits_by_hand():
    # Range 255: a scale of 1, rounded up to the next fp16; the zero point puts −55 at 0.
    stored = quantise(torch.tensor([[-55.0, 0.0, 100.4, 200.0]]), 8)
    assert stored.scale.tolist() == [[1.0009765625]]
    assert stored.zero.tolist() == [[55.0]]
    assert stored.values.tolist() == [[0, 55, 155, 255]]
    assert dequantise(stored).tolist() == [[-55 * 1.0009765625, 0.0, 100 * 1.0009765625, 200 * 1.0009765625]]


def test_four_bits_by_hand():
    x = torch.zeros(64)
    x[32], x[33], x[34] = -3.0, 12.0, 1.2
    stored = quantise(x, 4)
    assert stored.scale[1].item() == 1.0009765625
    assert stored.zero[1].item() == 3.0
    # Channels 32 and 33 share a byte, 32 in its low half; 34 is 4 with 35, a zero, above it.
    assert stored.values.shape == (32,)
    assert stored.values[16].item() == 0 | 15 << 4
    assert stored.values[17].item() == 4 | 3 << 4


def test_packing_is_undone():
    values = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    assert pack(values)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(unpack(pack(values)), values)
    with pytest.raises(ValueError, match="values has 3 channels"):
        pack(values[:, :3])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [0.0, 5.0, -300.0])
@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 1e3])
def test_no_value_is_off_by_more_than_half_a_scale(bits, offset, size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 64, generator=generator) * size + offset
    stored = quantise(x, bits)
    scale = stored.scale.double().repeat_interleave(64 // stored.scale.shape[-1], -1)
    error = (dequantise(stored, torch.float64) - x.double()).abs() / scale
    assert torch.isfinite(error).all()
    assert error.max() <= 0.5 + 1e-4  # of the division's own rounding
    # A scale is the range over the levels, unless the zero point would leave fp16's whole numbers.
    grouped = x.unflatten(-1, (stored.scale.shape[-1], -1))
    fair = torch.maximum((grouped.amax(-1) - grouped.amin(-1)) / (2**bits - 1), grouped.abs().amax(-1) / 2048)
    assert (stored.scale.float() <= fair * 1.01 + 2**-23).all()


def test_a_group_of_one_value_keeps_it():
    for value in (0.0, 3.0, -7.5):
        x = torch.full((1, 32), value)
        assert dequantise(quantise(x, 8))[0, 0].item() == pytest.approx(value, rel=1 / 2048)
        assert dequantise(quantise(x, 4))[0, 0].item() == pytest.approx(value, rel=1 / 2048)


@pytest.mark.parametrize("head_dim", [32, 96])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_of_appending_store_the_same(device_path, bits, head_dim, dtype):
    device, path = device_path
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([1e-6, 1e-2, 1.0, 50.0, 1.0])[:, None, None]
    offsets = torch.tensor([0.0, 0.0, 0.0, 0.0, 30.0])[:, None, None]
    # Three heads: not a power of two. Values are a slice of a wider tensor.
    keys = (torch.randn(5, 3, head_dim, generator=generator) * sizes + offsets).to(device, dtype)
    values = torch.randn(5, 6, head_dim, generator=generator).to(device, dtype)[:, 3:]
    slots = torch.tensor([0, 19, 7, 8, 12], device=device)
    shape = (2, 5, 3, 4, head_dim)
    stores = [Store(shape, dtype, torch.device(device), bits) for _ in range(4)]
    assert append(stores[0].layers[1], stores[1].layers[1], slots, keys, values, path="torch") == "torch"
    assert append(stores[2].layers[1], stores[3].layers[1], slots, keys, values, path=path) == path
    for expected, found, x in ((stores[0], stores[2], keys), (stores[1], stores[3], values)):
        pages = list(range(5))
        assert not found.read(0, pages, 20).any()
        wanted, got = expected.read(1, pages, 20), found.read(1, pages, 20)
        assert torch.isfinite(got).all()
        if path == "interpreter" or bits is None:
            assert torch.equal(got, wanted)
        else:  # a multiply-add that is fused may turn a rounding, by one step
            layer = expected.layers[1]
            assert isinstance(layer, Quantised)
            assert (got - wanted).abs().max() <= layer.scale.max()
        if bits is None:
            assert torch.equal(got[:, slots.cpu()], x.transpose(0, 1))
        rest = [slot for slot in range(20) if slot not in slots.tolist()]
        assert not got[:, rest].any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_stays_visible(device_path, bits, bad):
    device, path = device_path
    keys = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(2)).to(device)
    keys[0, 0, 5] = bad
    stores = [Store((1, 1, 1, 1, 32), torch.float32, torch.device(device), bits) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's NumPy says so, too
        append(stores[0].layers[0], stores[1].layers[0], torch.tensor([0], device=device), keys, keys, path=path)
    assert not torch.isfinite(stores[0].read(0, [0], 1)[0, 0, 5])


def test_bits_and_channels_that_cannot_be():
    with pytest.raises(ValueError, match="bits is 5: it can be 4 or 8"):
        quantise(torch.zeros(1, 32), 5)
    with pytest.raises(ValueError, match="head_dim is 48: 4 bits need a multiple of 32"):
        quantise(torch.zeros(1, 48), 4)
