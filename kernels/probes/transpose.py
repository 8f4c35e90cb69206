"""A matrix transpose through shared memory, with and without bank conflicts.

A warp writes a row of a 32 x 32 tile of fp32 to shared memory and reads a column: with rows of 32 words all of a
column lies in one of the 32 banks, 32 accesses one after the other; with rows of 33 words each in a bank of its own;
swizzled (column ``x`` of row ``y`` at ``x ^ y``) the same without the padding. One transpose waits for DRAM more than
for its tile; with more passes over the column shared memory alone sets the pace. Triton lays shared memory out itself,
so these are CUDA C++, compiled at run time by NVRTC.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from spikeprof.kernels.paths import TORCH, check, check_shape
from spikeprof.kernels.probes.probed import Probed

NVRTC = "nvrtc"
PATHS = ("auto", NVRTC, TORCH)
TILES = {"conflicting": "32", "padded": "33", "swizzled": "32"}  # words in a row of the tile
BANKS = 32  # of shared memory, a word of 4 bytes each
TILE, ROWS = 32, 8  # a block has 32 x 8 threads, each moves four elements

_SOURCE = """
extern "C" __global__ void transpose_@NAME@(const float* in, float* out, int rows, int columns) {
  __shared__ volatile float tile[32][@WORDS@];
  int tiles = (columns + 31) / 32;
  int left = blockIdx.x % tiles * 32, top = blockIdx.x / tiles * 32;
  int x = threadIdx.x;
  for (int y = threadIdx.y; y < 32; y += 8)
    if (top + y < rows && left + x < columns)
      tile[y][@WRITE@] = in[(size_t)(top + y) * columns + left + x];
  __syncthreads();
  for (int y = threadIdx.y; y < 32; y += 8)
    if (left + y < columns && top + x < rows) {
      float value = 0;
      for (int pass = 0; pass < @PASSES@; ++pass)
        value = tile[x][@READ@];
      out[(size_t)(left + y) * rows + top + x] = value;
    }
}
"""


def transpose(x: Tensor, tile: str = "padded", passes: int = 1, *, path: str = "auto") -> Probed:
    """Transpose fp32 [rows, columns], contiguous, through a tile that is ``conflicting``, ``padded`` or ``swizzled``.

    The tile's columns are read ``passes`` times; the last reading counts. ``auto`` is nvrtc on a GPU and torch, where
    tile and passes play no part, on the CPU. Raises ValueError where nvrtc is asked for, or meant, and not available.
    """
    check(tile in TILES, f"tile is {tile!r}: it can be {', '.join(TILES)}")
    check(passes >= 1, f"passes is {passes}: 1 at least")
    check(path in PATHS, f"path is {path!r}: it can be {', '.join(PATHS)}")
    check_shape("x", x, (None, None))
    check(x.dtype == torch.float32, f"x is {x.dtype}: it must be float32")
    check(x.is_contiguous(), f"x has strides {list(x.stride())}: it must be contiguous")
    check(x.numel() > 0, f"x has shape {list(x.shape)}: no size may be 0")
    path = (NVRTC if x.is_cuda else TORCH) if path == "auto" else path
    if path == TORCH:
        out = x.t().contiguous()
    else:
        reason = why_no_nvrtc() or ("" if x.is_cuda else f"the tensor is on {x.device}")
        check(not reason, f"path is 'nvrtc', not available: {reason}; take 'torch'")
        out = _launch(x, tile, passes)
    return Probed(out, path, 2 * x.numel() * 4, 0)


def why_no_nvrtc() -> str:
    """Why kernels cannot be compiled at run time here, or nothing."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    return "" if _compiler() else f"torch {torch.__version__} cannot compile CUDA C++ at run time (2.8 and later can)"


def source(tile: str, passes: int = 1) -> str:
    """CUDA C++ of one kernel."""
    write, read = ("x ^ y", "y ^ x") if tile == "swizzled" else ("x", "y")
    text = _SOURCE
    values = {"NAME": tile, "WORDS": TILES[tile], "WRITE": write, "READ": read, "PASSES": str(passes)}
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def ways(tile: str) -> int:
    """How many accesses of a warp that reads a column fall into the same bank, at most: one is no conflict."""
    words = int(TILES[tile])
    banks = [(row * words + (row if tile == "swizzled" else 0)) % BANKS for row in range(TILE)]
    return max(banks.count(bank) for bank in banks)


def _launch(x: Tensor, tile: str, passes: int) -> Tensor:
    rows, columns = x.shape
    out = torch.empty((columns, rows), dtype=x.dtype, device=x.device)
    blocks = -(-rows // TILE) * -(-columns // TILE)
    with torch.cuda.device(x.device):
        _kernel(tile, passes, x.device.index)(grid=(blocks, 1, 1), block=(TILE, ROWS, 1), args=[x, out, rows, columns])
    return out


def _compiler() -> Any:
    """torch's own front end of NVRTC; its name has an underscore in the releases that have it first."""
    return getattr(torch.cuda, "compile_kernel", None) or getattr(torch.cuda, "_compile_kernel", None)


@functools.cache
def _kernel(tile: str, passes: int, _device: int) -> Any:
    """One compiled kernel for each device: a module belongs to the context that loaded it."""
    return _compiler()(source(tile, passes), f"transpose_{tile}")
