"""Matrix product: the rate of floating-point operations that this device reaches."""

from __future__ import annotations

import torch
from torch import Tensor

from spikeprof.kernels.paths import TORCH, check, check_same, check_shape, chosen
from spikeprof.kernels.probes.probed import Probed

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def matmul(a: Tensor, b: Tensor, *, path: str = "auto") -> Probed:
    """``a @ b`` in the dtype of the inputs, accumulated in fp32: [m, k] and [k, n], both contiguous, to [m, n].

    The kernel loads tiles through tensor descriptors: rows of ``b`` and of ``a`` must be multiples of 16 bytes. On
    the torch path fp32 follows ``torch.backends.cuda.matmul.fp32_precision``; the kernel never rounds to TF32.
    Raises ValueError for what does not fit.
    """
    check_same("b", b, "a", a)
    check_shape("a", a, (None, None))
    m, k = a.shape
    check_shape("b", b, (k, None))
    n = b.shape[1]
    check(a.dtype in _DTYPES, f"a is {a.dtype}: it can be float16, bfloat16 or float32")
    check(min(m, n, k) > 0, f"a is {[m, k]}, b {[k, n]}: no size may be 0")
    path = chosen(path, a)
    if path == TORCH:
        out = torch.matmul(a, b)
    else:
        _check_rows("a", a)
        _check_rows("b", b)
        from spikeprof.kernels.probes.gemm_triton import multiply

        out = torch.empty((m, n), dtype=a.dtype, device=a.device)
        multiply(a, b, out)
    return Probed(out, path, (m * k + k * n + m * n) * a.element_size(), 2 * m * n * k)


def _check_rows(name: str, matrix: Tensor) -> None:
    check(matrix.is_contiguous(), f"{name} has strides {list(matrix.stride())}: it must be contiguous")
    row_bytes = matrix.shape[1] * matrix.element_size()
    check(row_bytes % 16 == 0, f"{name} has rows of {row_bytes} bytes: this path needs a multiple of 16; take 'torch'")
