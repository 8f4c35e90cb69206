"""Keys, or values, of all layers in pages, plain or quantised. Which page is whose is not known here."""

from __future__ import annotations

import torch
from torch import Tensor

from spikeprof.kernels.cache.pages import Quantised
from spikeprof.kernels.cache.quant import check_bits, dequantise, quantise
from spikeprof.kernels.cache.usage import groups_count


class Store:
    """[layers, pages, kv_heads, page_size, head_dim], zero at first, in ``dtype`` or quantised to ``bits``.

    ``layers`` has each layer's part as attention sees it. A quantised token is written once, with scale and zero point
    of its own: appending to a page never touches what is in it.
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device, bits: int | None
    ) -> None:
        self.dtype, self.kv_heads, self.head_dim = dtype, shape[2], shape[4]
        self._slots_count = shape[1] * shape[3]
        *places, head_dim = shape
        if bits is None:
            self._tensors = [torch.zeros(shape, dtype=dtype, device=device)]
            self.layers: tuple[Tensor | Quantised, ...] = tuple(self._tensors[0].unbind(0))
            return
        check_bits(bits)
        groups = groups_count(head_dim, bits)
        self._tensors = [
            torch.zeros((*places, head_dim * bits // 8), dtype=torch.uint8, device=device),
            torch.zeros((*places, groups), dtype=torch.float16, device=device),
            torch.zeros((*places, groups), dtype=torch.float16, device=device),
        ]
        parts = zip(*(tensor.unbind(0) for tensor in self._tensors), strict=True)
        self.layers = tuple(Quantised(values, scale, zero, bits) for values, scale, zero in parts)

    @property
    def device(self) -> torch.device:
        """Where it is; with its index, which a name like "cuda" lacks."""
        device: torch.device = self._tensors[0].device
        return device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.bytes_count // self._slots_count

    @property
    def bytes_count(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy pages, (from, to), in all layers."""
        sources, targets = torch.tensor(copies, device=self._tensors[0].device).unbind(1)
        for tensor in self._tensors:
            tensor[:, targets] = tensor[:, sources]

    def read(self, layer: int, pages: list[int], length: int) -> Tensor:
        """The first ``length`` tokens in these pages [kv_heads, length, head_dim], dequantised."""
        stored = self.layers[layer]
        if isinstance(stored, Quantised):
            picked = Quantised(stored.values[pages], stored.scale[pages], stored.zero[pages], stored.bits)
            found = dequantise(picked, self.dtype)
        else:
            found = stored[pages]
        return found.transpose(0, 1).flatten(1, 2)[:, :length]


def write(stored: Tensor | Quantised, slots: Tensor, x: Tensor) -> None:
    """Put tokens ``x`` [tokens, kv_heads, head_dim] at flat slots into one layer, in torch."""
    page_size = (stored.values if isinstance(stored, Quantised) else stored).shape[2]
    page, offset = slots // page_size, slots % page_size
    if not isinstance(stored, Quantised):
        stored[page, :, offset] = x
        return
    new = quantise(x, stored.bits)
    stored.values[page, :, offset] = new.values
    stored.scale[page, :, offset] = new.scale
    stored.zero[page, :, offset] = new.zero
