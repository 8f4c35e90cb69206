"""Every threshold of the detector, with its unit. What the issue asks for are the defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields

from spikeprof.profiler.errors import UsageError

_MULTIPLES = (("window_s", "cell_s"), ("baseline_cell_s", "cell_s"), ("baseline_s", "baseline_cell_s"))


@dataclass(frozen=True, slots=True)
class Options:
    """Thresholds of the rules, the times that they look at, and the bounds of what is kept.

    All times are of events, not of the clock on the wall. Raises UsageError where they contradict each other.
    """

    # penetration: both limits, and all floors, must be passed
    miss_rate_ratio: float = 3.0  # miss rate over its baseline. Over a baseline of 1/4, where three times as much
    # is hardly left to reach, the hit rate must instead fall below a third (this ratio's inverse) of its baseline
    qps_ratio: float = 2.5  # look-ups per second over their baseline
    min_qps: float = 20.0  # a quieter pattern never fires
    min_misses_count: int = 10  # in one window
    min_miss_rate: float = 0.05  # 0-1
    baseline_miss_rate_floor: float = 0.01  # a baseline below it counts as this much
    min_unfilled_share: float = 0.5  # of the misses: keys neither known, nor hit lately, nor filled since
    young_hits_ratio: float = 4.0  # unfilled misses must exceed so many times the hits of keys first filled lately:
    # new keys of real traffic soon hit about as often as they miss, and random keys never
    refill_s: float = 30.0  # so long a key counts as hit, or as filled, lately

    # states: raise after k of n cells, recover after quiet
    cell_s: float = 0.25  # resolution of event time
    window_s: float = 1.0  # rates are over the last so many seconds; a multiple of cell_s
    raise_cells_count: int = 3  # k: windows, one ending with each cell, that pass all limits …
    raise_of_cells_count: int = 4  # n: … among so many in a row
    recover_s: float = 10.0  # without any window that passes recover_ratio of the limits
    recover_ratio: float = 0.8
    escalate_ratio: float = 4.0  # unfilled misses per second over those when raised: the alert becomes critical

    # baseline
    baseline_s: float = 300.0  # the last so many seconds
    baseline_cell_s: float = 5.0  # medians are over cells of this length
    cold_start_s: float = 60.0  # a new pattern is learned for so long before it can fire
    reference_s: float = 3600.0  # time constant of the slow reference that a ramp cannot drag along
    baseline_max_age_s: float = 7 * 86400.0  # a restored baseline older than this is not used

    # hot-missing-key
    hot_key_miss_rate: float = 0.95  # above it …
    hot_key_s: float = 30.0  # … for so long …
    hot_key_min_lookups_count: int = 60  # … with at least so many look-ups in that time

    # illegal-keys
    illegal_per_s: float = 100.0  # look-ups of keys that exist nowhere, over all patterns and tenants

    # event time
    lateness_s: float = 5.0  # look-ups this much behind the newest still count; later ones are counted as late
    max_ahead_s: float = 30.0  # look-ups further ahead of the newest are held back until enough others agree
    clock_quorum_count: int = 32  # so many look-ups in a row agree that time has jumped

    # bounds
    max_series_count: int = 4096  # pairs of tenant and pattern
    max_patterns_per_prefix_count: int = 64  # further ones of that first part of a key are one: `prefix:{any}`
    admit_lookups_count: int = 20  # a pattern gets a row of its own after so many
    max_tenants_count: int = 256  # further ones are one: `{any}`
    max_hot_keys_count: int = 256
    key_memory_count: int = 1 << 20  # keys whose last misses are remembered; a power of two
    hot_keys_per_pattern_count: int = 5  # further ones are in the snapshot, without an alert
    hit_memory_count: int = 2_000_000  # keys remembered as hit, in each of two generations
    sample_keys_count: int = 5  # in an alert
    sample_key_chars_count: int = 200  # of each of them
    max_key_chars_count: int = 256  # what is behind them does not count for the pattern

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise UsageError(f"{field.name} is {getattr(self, field.name)}: it must be above 0")
        if self.raise_cells_count > self.raise_of_cells_count:
            raise UsageError(
                f"raise_cells_count {self.raise_cells_count} is more than raise_of_cells_count "
                f"{self.raise_of_cells_count}: no alert could be raised"
            )
        for longer, shorter in _MULTIPLES:
            whole_s, part_s = getattr(self, longer), getattr(self, shorter)
            if abs(whole_s / part_s - round(whole_s / part_s)) > 1e-9 or whole_s < part_s:
                raise UsageError(f"{longer} is {whole_s} s: it must be a multiple of {shorter}, {part_s} s")
        if self.key_memory_count & (self.key_memory_count - 1):
            raise UsageError(f"key_memory_count is {self.key_memory_count}: it must be a power of two")

    @property
    def window_cells_count(self) -> int:
        """Cells in one window."""
        return round(self.window_s / self.cell_s)

    @property
    def lateness_cells_count(self) -> int:
        """Cells that look-ups may still come for, besides the newest."""
        return -int(-self.lateness_s // self.cell_s)
