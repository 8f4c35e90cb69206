"""Random gather: rows of a table in no order, a sector or more each."""

from __future__ import annotations

import torch
from torch import Tensor

from spikeprof.kernels.paths import TORCH, check, check_shape, chosen
from spikeprof.kernels.probes.probed import Probed


def random_rows(rows: int, count: int, *, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """``count`` row numbers below ``rows``, uniform, int64 [count]: indices that need no check where they are used."""
    check(rows > 0, f"rows is {rows}: it must be 1 or more")
    check(count > 0, f"count is {count}: it must be 1 or more")
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(rows, (count,), generator=generator, device=device)


def gather(table: Tensor, index: Tensor, *, path: str = "auto") -> Probed:
    """``table[index]``: contiguous [rows, width] and int64 [count] to [count, width].

    Indices on a GPU are not read back to check them, take those of :func:`random_rows`; on the CPU one that is out of
    range raises IndexError. Bytes count the rows read and written and the indices.
    """
    check_shape("table", table, (None, None))
    check_shape("index", index, (None,))
    check(index.dtype == torch.int64, f"index is {index.dtype}: it must be int64")
    check(index.device == table.device, f"index is on {index.device}, table on {table.device}")
    check(table.is_contiguous(), f"table has strides {list(table.stride())}: it must be contiguous")
    check(table.numel() > 0, f"table has shape {list(table.shape)}: no size may be 0")
    check(index.numel() > 0, "index is empty: it must name 1 row or more")
    if not index.is_cuda and not 0 <= int(index.min()) <= int(index.max()) < table.shape[0]:
        raise IndexError(
            f"index has {int(index.min())} to {int(index.max())}: table has rows 0 to {table.shape[0] - 1}"
        )
    path = chosen(path, table)
    if path == TORCH:
        out = torch.index_select(table, 0, index)
    else:
        from spikeprof.kernels.probes.gather_triton import gather_rows

        out = gather_rows(table, index)
    return Probed(out, path, 2 * out.numel() * out.element_size() + 8 * index.numel(), 0)
