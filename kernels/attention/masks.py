"""Which keys a query sees. The last query stands at the last key: query i at position ``i + k_len - q_len``."""

from __future__ import annotations

import torch
from torch import Tensor


def key_range(positions: range, k_len: int, causal: bool, window: int | None) -> range:
    """The keys that any query at these positions sees: from the window of the first one to the last one itself."""
    begin = 0 if window is None else max(0, positions.start - window + 1)
    end = min(k_len, positions.stop) if causal else k_len
    return range(begin, max(begin, end))


def visible(positions: range, keys: range, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """bool [queries, keys], True where the query sees the key; None where all of them see all."""
    sees_last = not causal or keys.stop - 1 <= positions.start
    sees_first = window is None or keys.start > positions.stop - 1 - window
    if sees_last and sees_first:
        return None
    behind = torch.arange(positions.start, positions.stop, device=device)[:, None]
    behind = behind - torch.arange(keys.start, keys.stop, device=device)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)
