"""Which path a kernel takes, and the checks that all of them share.

``triton``: the kernel on a GPU. ``interpreter``: the same Triton source on CPU tensors, slow, for tests
(TRITON_INTERPRET=1 in the environment before the kernels are imported). ``torch``: plain torch, anywhere.
``auto`` means triton for CUDA tensors where Triton is installed and does not interpret, else torch; results say which
one ran.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import NamedTuple

from torch import Tensor

TRITON, INTERPRETER, TORCH = "triton", "interpreter", "torch"
PATHS = ("auto", TRITON, INTERPRETER, TORCH)


class Ran(NamedTuple):
    """What a kernel made, and the path that it ran on."""

    out: Tensor
    path: str


class Attended(NamedTuple):
    """Attention's output, shaped as the queries, and the natural log-sum-exp of the scaled scores, one a query."""

    out: Tensor
    lse: Tensor
    path: str


def chosen(path: str, tensor: Tensor) -> str:
    """The path that ``path`` means for this tensor's device. Raises ValueError where it cannot be taken."""
    if path not in PATHS:
        raise ValueError(f"path is {path!r}: it can be {', '.join(PATHS)}")
    if path == "auto":
        return TRITON if tensor.is_cuda and has_triton() and not is_interpreted() else TORCH
    if path in (TRITON, INTERPRETER) and not has_triton():
        raise ValueError(f"path is {path!r}, but triton is not installed: pip install 'spikeprof[kernels]', or torch")
    if path == TRITON and not tensor.is_cuda:
        raise ValueError(f"path is 'triton', but the tensors are on {tensor.device}: it needs a GPU; take 'torch'")
    if path == TRITON and is_interpreted():
        raise ValueError("path is 'triton', but TRITON_INTERPRET=1 is set: unset it, or take 'torch'")
    if path == INTERPRETER and not is_interpreted():
        raise ValueError("path is 'interpreter': set TRITON_INTERPRET=1 before spikeprof.kernels is imported")
    if path == INTERPRETER and tensor.is_cuda:
        raise ValueError(f"path is 'interpreter', but the tensors are on {tensor.device}: it runs on the CPU")
    return path


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter: then on CPU tensors, and nowhere else."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def check(condition: bool, text: str) -> None:
    """Raise ValueError with ``text``, which names the argument, its value and what is allowed."""
    if not condition:
        raise ValueError(text)


def check_same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both are on one device and of one dtype."""
    check(tensor.device == other.device, f"{name} is on {tensor.device}, {other_name} on {other.device}")
    check(tensor.dtype == other.dtype, f"{name} is {tensor.dtype}, {other_name} {other.dtype}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless the tensor has this shape; None stands for any size."""
    fits = tensor.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    check(fits, f"{name} has shape {list(tensor.shape)}, [{wanted}] is wanted")
