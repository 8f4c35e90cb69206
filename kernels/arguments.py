"""What the commands take on their command lines."""

from __future__ import annotations

import argparse

import torch

from spikeprof.kernels.paths import check


def device_named(name: str) -> torch.device:
    """``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``. Raises ValueError for what is not here."""
    gpus = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    known = kind == "cuda" and (index.isdigit() or name == "cuda")
    check(known, f"device is {name!r}: it can be auto, cpu, cuda or cuda:N")
    number = int(index) if index else 0
    check(number < gpus, f"device is {name!r}: there {'is 1 CUDA GPU' if gpus == 1 else f'are {gpus} CUDA GPUs'} here")
    return torch.device("cuda", number)


def positive(text: str) -> int:
    """A whole number, 1 or more. Raises argparse's error."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}: it must be a whole number, 1 or more")
    return int(text)
