"""Look-ups as a proxy collects them, and what it counts beside them."""

from __future__ import annotations

from dataclasses import dataclass

#: Index of the first look-up of a run, tenant, time (Unix seconds) and database of all of it.
Run = tuple[int, str, float, str]


@dataclass(slots=True)
class ProxyCounts:
    """What a proxy saw and what it left out; nothing is left out without being counted here."""

    connections: int = 0
    open_connections: int = 0
    lookups: int = 0
    dropped_lookups: int = 0
    """Known, but the receiver was still busy with too many earlier ones."""
    unclear_lookups: int = 0
    """Keys too long to keep, and EXISTS of several keys of which some exist: the reply does not say which."""
    failed_lookups: int = 0
    """Keys of look-ups that were answered with an error."""
    unanswered_lookups: int = 0
    """Keys of look-ups sent under CLIENT REPLY OFF or SKIP."""
    unread_bytes: int = 0
    """Forwarded, but not looked into, since analysis was behind or the connection is not followed."""
    unfollowed: int = 0
    """How often a connection ceased to be followed."""
    malformed: int = 0
    """Connections whose client sent what is no RESP, or whose upstream did."""
    refused: int = 0
    """Connections ended with an error because the upstream could not be reached or was lost."""
    nil_answers: int = 0
    limit_answers: int = 0
    """Commands that the guard answered in place of the upstream."""
    ttl_failures: int = 0
    """How often the upstream could not be asked how long entries live."""
    guard_errors: int = 0
    receiver_errors: int = 0
    analysis_errors: int = 0
    """Exceptions of the guard, of the receiver of look-ups, and of the analysis; traffic went on."""


class Found:
    """Look-ups being collected: keys and whether they hit, and runs of them with the same tenant and time."""

    __slots__ = ("hits", "keys", "runs")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.hits: list[bool] = []
        self.runs: list[Run] = []

    def run(self, tenant: str, now_s: float, db: str) -> None:
        """What is added from here on has this tenant, time and database."""
        if not self.runs or self.runs[-1][1:] != (tenant, now_s, db):
            self.runs.append((len(self.keys), tenant, now_s, db))

    def drop_beyond(self, count: int) -> int:
        """Keep the first ``count``; how many were dropped."""
        beyond = len(self.keys) - count
        if beyond <= 0:
            return 0
        del self.keys[count:], self.hits[count:]
        self.runs = [run for run in self.runs if run[0] < count]
        return beyond

    def take(self) -> tuple[list[bytes], list[bool], list[Run]]:
        """What was collected; begin anew."""
        taken = (self.keys, self.hits, self.runs)
        self.keys, self.hits, self.runs = [], [], []
        return taken
