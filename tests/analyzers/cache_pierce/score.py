"""Run a detector over labelled traffic, and count what it found, missed and made up."""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.cache_pierce.scenarios import T0_S, Expected, Scenario  # tests/ is on the path

from spikeprof.analyzers.cache_pierce.detector import Detector
from spikeprof.analyzers.cache_pierce.known import KnownKeys
from spikeprof.analyzers.cache_pierce.model import Alert


@dataclass
class Score:
    """Incidents found and missed; alerts that belong to none; further alerts about an incident; delays in seconds."""

    found_count: int = 0
    missed_count: int = 0
    false_count: int = 0
    repeated_count: int = 0
    delays_s: tuple[float, ...] = ()

    def __add__(self, other: Score) -> Score:
        return Score(
            self.found_count + other.found_count,
            self.missed_count + other.missed_count,
            self.false_count + other.false_count,
            self.repeated_count + other.repeated_count,
            self.delays_s + other.delays_s,
        )


def alerts_of(scenario: Scenario, block_s: float = 2.0) -> list[Alert]:
    """All alerts that a detector gives, restarted with its baselines where the scenario says so."""
    known = None if scenario.known is None else KnownKeys(scenario.known, 200_000)
    detector = Detector(known=known)
    is_restarted = scenario.restart_s is None
    alerts: list[Alert] = []
    for end_s, block in scenario.blocks(block_s):
        if not is_restarted and scenario.restart_s is not None and end_s > scenario.restart_s:
            is_restarted, detector = True, Detector(known=known, baselines=detector.baseline_rows())
        alerts += detector.feed(block)
    return alerts + detector.finish()


def score(scenario: Scenario, alerts: list[Alert]) -> Score:
    """Hold the raised alerts against the labels."""
    total = Score()
    raised = [alert for alert in alerts if alert.kind == "raised"]
    left = list(raised)
    for incident in scenario.expected:
        own = [alert for alert in left if _belongs(alert, incident, incident.rule)]
        in_time = [alert for alert in own if alert.ts_s - T0_S <= incident.start_s + incident.within_s]
        rules = {incident.rule, *scenario.also}
        left = [alert for alert in left if not any(_belongs(alert, incident, rule) for rule in rules)]
        if in_time:
            from_s = incident.start_s if incident.delay_from_s is None else incident.delay_from_s
            delay_s = in_time[0].ts_s - T0_S - from_s
            total += Score(found_count=1, repeated_count=len(own) - 1, delays_s=(delay_s,))
        else:
            total += Score(missed_count=1, repeated_count=max(len(own) - 1, 0))
    return total + Score(false_count=len(left))


def _belongs(alert: Alert, incident: Expected, rule: str) -> bool:
    at_s = alert.ts_s - T0_S
    # once it is over, what it left in the windows may still raise
    in_time = incident.start_s <= at_s <= incident.end_s + 2.0
    return alert.rule == rule and in_time and incident.tenant in (None, alert.tenant)
