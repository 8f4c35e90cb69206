"""The files that a sampler writes, and that the tables are made from: both ends of them.

For each GPU ``pm-<device>.jsonl``, one event a line, and for each list of metrics that was sampled
``pm-<device>-<number>.bin``: rows of begin and end (int64, Unix ns) and one float64 for each of the list's metrics.
Both may end anywhere: the sampler may have been killed. ``gpus.json`` tells which GPU each device number means, which
nobody else knows any more when a recording that was cut off is put together later.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: The folder of a run's spool that holds them.
FOLDER = "counters"

#: What a sampler exits with that cannot write any more, nor say so in its files.
EXIT_DISK_FULL = 4

_GPUS = "gpus.json"

_WORD_BYTES = 8


@dataclass
class SampledSet:
    """One list of metrics, sampled on one GPU. ``rows`` [samples, 2 + metrics] is mapped from the file."""

    device: int
    metrics: tuple[str, ...]
    interval_ns: int
    path: Path

    @property
    def rows(self) -> npt.NDArray[np.float64]:
        """The file as float64; times come by ``times``."""
        width = 2 + len(self.metrics)
        if not self.path.exists():
            return np.empty((0, width))
        count = self.path.stat().st_size // (width * _WORD_BYTES)
        if not count:
            return np.empty((0, width))
        return np.memmap(self.path, np.float64, "r", shape=(count, width))

    def times(self) -> npt.NDArray[np.int64]:
        """Begin and end of each sample [samples, 2], Unix ns."""
        rows = self.rows
        return np.asarray(rows.view(np.int64)[:, :2]) if len(rows) else np.empty((0, 2), np.int64)

    def values(self) -> npt.NDArray[np.float64]:
        """[samples, metrics]."""
        return np.asarray(self.rows[:, 2:])


@dataclass
class SamplerFiles:
    """All that one sampler wrote."""

    device: int
    sets: list[SampledSet] = field(default_factory=list)
    refused: str = ""  # why nothing was sampled
    missing: dict[str, str] = field(default_factory=dict)  # metric -> why not
    problems: list[str] = field(default_factory=list)
    paused_ns: int = 0  # time in which sampling stood still so that decoding could catch up
    overflows_count: int = 0
    finished: bool = False


def events_path(folder: Path, device: int) -> Path:
    """The events of a GPU's sampler."""
    return folder / f"pm-{device}.jsonl"


def samples_path(folder: Path, device: int, number: int) -> Path:
    """The samples of one of its lists of metrics."""
    return folder / f"pm-{device}-{number}.bin"


def write_gpus(folder: Path, numbers: Mapping[str, int]) -> None:
    """Note which GPU (UUID) each device number means."""
    with os.fdopen(os.open(folder / _GPUS, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        json.dump(dict(numbers), file)


def read_gpus(folder: Path) -> dict[str, int]:
    """The device number of each GPU by UUID; empty where it was not noted, or cannot be read."""
    try:
        found = json.loads((folder / _GPUS).read_text())
        return {str(gpu): int(number) for gpu, number in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def read(folder: Path) -> list[SamplerFiles]:
    """What the samplers of a run wrote, GPU by GPU. A line that cannot be read is passed over."""
    found = []
    for path in folder.glob("pm-*.jsonl"):
        if (number := re.fullmatch(r"pm-(\d{1,6})", path.stem, re.ASCII)) and path.is_file():
            found.append(_read_one(folder, path, int(number[1])))
    return sorted(found, key=lambda files: files.device)


def _read_one(folder: Path, path: Path, device: int) -> SamplerFiles:
    files = SamplerFiles(device)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            _apply(files, folder, json.loads(line))
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            continue
    return files


def _apply(files: SamplerFiles, folder: Path, event: dict[str, Any]) -> None:
    match event["ev"]:
        case "set":
            path = samples_path(folder, files.device, int(event["number"]))
            metrics = tuple(str(name) for name in event["metrics"])
            files.sets.append(SampledSet(files.device, metrics, int(event["interval_ns"]), path))
        case "refused":
            files.refused = str(event["reason"])
        case "missing":
            files.missing[str(event["metric"])] = str(event["reason"])
        case "problem":
            files.problems.append(str(event["text"]))
        case "paused":
            files.paused_ns += int(event["ns"])
        case "overflow":
            files.overflows_count += 1
        case "end":
            files.finished = True
