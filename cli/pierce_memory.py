"""Baselines over restarts: read at the start, from SQLite and Prometheus; kept in SQLite while running."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spikeprof.cli.pierce_options import Memory
from spikeprof.profiler.pierce_store import BaselineStore, default_path

if TYPE_CHECKING:
    from spikeprof.analyzers.cache_pierce.baseline import BaselineRow


class BaselineKeeper:
    """The baselines of one ``source``. ``tell`` gets what goes wrong; nothing here stops the detector.

    Raises UsageError, InputError where the user named a file or Prometheus that cannot be what was meant.
    """

    def __init__(self, memory: Memory, source: str, tell: Callable[[str], None]) -> None:
        self._memory = memory
        self._tell = tell
        self._store: BaselineStore | None = None
        if memory.baselines != "none":
            self._store = BaselineStore(Path(memory.baselines) if memory.baselines else default_path(), source)

    def load(self) -> list[BaselineRow]:
        """Baselines of earlier runs."""
        import msgspec

        from spikeprof.analyzers.cache_pierce.baseline import BaselineRow

        rows: list[Any] = []
        if self._memory.baselines_prometheus:
            from spikeprof.profiler.pierce_prometheus import read_baselines

            rows += read_baselines(self._memory.baselines_prometheus, self._memory.baselines_selector, time.time())
        if self._store is not None:  # last: what is twice there is newer here
            rows += self._store.load(time.time())
            if self._store.problem:
                self._tell(f"baselines of earlier runs are not used: {self._store.problem}")
        try:
            return msgspec.convert(rows, list[BaselineRow])
        except msgspec.ValidationError as error:
            self._tell(f"baselines of earlier runs are not used: they are not as this version keeps them ({error})")
            return []

    def save(self, rows: Sequence[BaselineRow]) -> None:
        """Keep baselines. Slow: call it in a thread."""
        if self._store is None:
            return
        self._store.save([dataclasses.asdict(row) for row in rows], time.time())
        if self._store.problem:
            self._tell(f"baselines are in memory alone: {self._store.problem}; watching goes on")
