"""The detector: look-ups in, alerts out. Event time only; no I/O, no threads, no clock of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from spikeprof.analyzers.cache_pierce.baseline import BaselineRow
from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.analyzers.cache_pierce.model import Alert, Snapshot
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.profiler.lookups import Lookups


class Detector:
    """Finds penetration in a stream of look-ups. Not safe to use from several threads at once.

    ``known`` may be replaced (``detector.known = …``) between any two calls; None = illegal keys are not measured.
    ``baselines`` are rows of ``baseline_rows()`` of an earlier run.
    """

    def __init__(
        self, options: Options | None = None, known: KnownKeys | None = None, baselines: Iterable[BaselineRow] = ()
    ) -> None:
        self.options = options or Options()
        self.known = known
        raise NotImplementedError

    def feed(self, lookups: Lookups) -> list[Alert]:
        """Take look-ups in, in any order of time; alerts in the order in which they were decided."""
        raise NotImplementedError

    def feed_counts(
        self,
        starts_s: npt.NDArray[np.float64],
        ends_s: npt.NDArray[np.float64],
        tenants: Sequence[str],
        patterns: Sequence[str],
        lookups: npt.NDArray[np.float64],
        misses: npt.NDArray[np.float64],
    ) -> list[Alert]:
        """Take counts in where keys are not known: scraped counters, hardware counters.

        All have one length; counts are spread evenly over [start, end) in Unix seconds.
        """
        raise NotImplementedError

    def advance(self, now_s: float) -> list[Alert]:
        """Say that event time has come to ``now_s``, although no look-up tells (live sources: twice a second or so)."""
        raise NotImplementedError

    def finish(self) -> list[Alert]:
        """Take in what was held back, and decide about the last cell: at the end of a file."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """How things stand now."""
        raise NotImplementedError

    def baseline_rows(self) -> list[BaselineRow]:
        """Baselines to keep for the next run."""
        raise NotImplementedError
