"""Which keys exist: from a file, a scan of the cache, or look-ups that hit; built anew and swapped while running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spikeprof.cli.pierce_options import Knowledge
from spikeprof.profiler.errors import InputError, UsageError

if TYPE_CHECKING:
    from spikeprof.analyzers.cache_pierce.known import KnownKeys
    from spikeprof.profiler.lookups import Lookups

#: Gives every key there is, each time anew.
Scan = Callable[[], Iterable[str]]
#: A script sent this long before a filter is begun may still write: Redis lets others in on it after 5 s.
_DOUBT_S = 5.0


class KnownSource:
    """Keeps the filter of known keys as the options ask. ``current`` is the filter to use now, None = none (yet).

    ``scan`` reads all keys of the cache, where that was asked for. Raises UsageError for options that contradict.
    """

    def __init__(self, knowledge: Knowledge, scan: Scan | None = None) -> None:
        self._options = knowledge
        self._scan = scan
        if knowledge.known_learn_s < 0 or knowledge.known_refresh_s < 0:
            raise UsageError("--known-learn and --known-refresh take seconds, 0 or more")
        if not 0 < knowledge.known_false_positives < 1:
            raise UsageError(f"--known-false-positives {knowledge.known_false_positives:g}: must lie between 0 and 1")
        if knowledge.known_refresh_s and not self.is_asked:
            raise UsageError(
                "--known-refresh needs something to build from: --known FILE, --known-scan or --known-learn"
            )
        self.current: KnownKeys | None = None
        self._learning: KnownKeys | None = None
        self._building: KnownKeys | None = None
        self._doubted_s = float("-inf")
        self._began_s = 0.0

    @property
    def is_asked(self) -> bool:
        """Whether any source of known keys was named."""
        return self._options.known is not None or self._scan is not None or self._options.known_learn_s > 0

    @property
    def is_refreshed(self) -> bool:
        """Whether the filter is built anew from time to time."""
        return self._options.known_refresh_s > 0

    def build(self) -> None:
        """Build the filter from all that can be read, and use it. Slow: call it in a thread. Raises InputError."""
        self._began_s = time.monotonic()
        following = self._filter()
        if self._began_s - self._doubted_s < _DOUBT_S:
            following.doubt()
        if self._options.known is not None or self._scan is not None:
            self._building = following  # so that it learns what is written while it is built
            try:
                following.learn(self._all())
                self.current = following
            finally:
                self._building = None
        elif self._options.known_learn_s:
            self._learning = following

    def is_due(self) -> bool:
        """Whether it is time to build anew."""
        refresh_s = self._options.known_refresh_s
        return bool(refresh_s) and time.monotonic() - self._began_s >= refresh_s and self._learning is None

    @property
    def problem(self) -> str:
        """Why the filter is not to be trusted; empty where it is."""
        if self.current is None or self.current.is_complete:
            return ""
        if self.current.not_taken_count:
            return (
                "the filter of known keys is full, keys that it has no room for count as illegal, and none is answered "
                f"nil: give it more room than --known-capacity {self._options.known_capacity}"
            )
        return (
            "a command was sent whose keys cannot be told (a script, say): none is answered nil until the filter of "
            "known keys is built anew; read-only scripts (EVAL_RO) do without"
        )

    def saw(self, lookups: Lookups) -> None:
        """Learn keys of look-ups that hit; a filter that has learned for long enough is used."""
        if not self._options.known_learn_s:
            return
        import pyarrow as pa

        hits = lookups.keys.filter(pa.array(lookups.hits)).unique().to_pylist()
        for known in (self.current, self._learning):
            if known is not None:
                known.learn(hits)
        if self._learning is not None and time.monotonic() - self._began_s >= self._options.known_learn_s:
            self.current, self._learning = self._learning, None

    def wrote(self, keys: Sequence[str] | None) -> None:
        """Keys are being written: each filter learns them. None: which ones cannot be told."""
        if keys is None:
            self._doubted_s = time.monotonic()
        for known in (self._building, self._learning, self.current):  # in the order in which one becomes the other
            if known is None:
                continue
            if keys is None:
                known.doubt()
            else:
                known.learn(keys)

    def _filter(self) -> KnownKeys:
        from spikeprof.analyzers.cache_pierce.known import KnownKeys

        return KnownKeys((), self._options.known_capacity, self._options.known_false_positives)

    def _all(self) -> Iterator[str]:
        if self._options.known is not None:
            yield from _lines(self._options.known)
        if self._scan is not None:
            yield from self._scan()


def _lines(path: Path) -> Iterator[str]:
    """Keys of a file, one a line, empty lines left out. What is not UTF-8 reads as in look-ups: ``\\xNN``."""
    try:
        with path.open(encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            for line in file:
                key = line.rstrip("\r\n")
                if key:
                    yield key
    except OSError as error:
        raise InputError(f"cannot read known keys from {path}: {error.strerror or error}") from error
