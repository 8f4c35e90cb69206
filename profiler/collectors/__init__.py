"""Collectors: what the supervising process samples from outside while the program runs. One external library each.

The session starts collectors in order and stops them in reverse. A collector never raises and never stops the
run: whatever goes wrong becomes a note in the manifest that says what was not measured and why.
"""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from spikeprof.profiler.trace import CollectorNote


class Collector(Protocol):
    """What the session drives. ``name`` is the key of the note in the manifest."""

    name: str

    def start(self, t0_unix_ns: int) -> None:
        """Begin; times in the tables count from ``t0_unix_ns`` (Unix nanoseconds). Never raises."""
        ...

    def stop(self) -> tuple[CollectorNote, dict[str, pa.Table]]:
        """End, and hand over what was collected: the note, and tables of the schema by name. Never raises.

        A table is absent when it could not be collected, and empty when nothing happened. A second call,
        or one without ``start``, gives the state ``off`` and no tables.
        """
        ...
