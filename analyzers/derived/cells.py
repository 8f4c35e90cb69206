"""Cells of tables: numbers that may be unknown, and lists that are written as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt


def finite(value: float) -> float | None:
    """A number, None where it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def numbers(values: npt.NDArray[np.floating]) -> list[float | None]:
    """A column of numbers, None for what is NaN or infinite."""
    return [finite(value) for value in values.tolist()]


def json_list(text: str) -> list[Any] | None:
    """The list that a text holds, None where it holds none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None
