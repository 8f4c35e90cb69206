"""Labelled traffic, one run of each kind; ``benchmarks/pierce_scenarios.py`` runs many."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest
from analyzers.cache_pierce.scenarios import SCENARIOS, Rng, Scenario, steady
from analyzers.cache_pierce.score import alerts_of, score


@pytest.mark.parametrize("make", SCENARIOS, ids=lambda make: make.__name__)
def test_each_kind_of_traffic(make: Callable[[Rng, float], Scenario]) -> None:
    made = make(np.random.default_rng([7, zlib.crc32(make.__name__.encode())]), 45.0)
    alerts = alerts_of(made)
    total = score(made, alerts)
    assert (total.missed_count, total.false_count) == (0, 0), alerts
    assert total.found_count == len(made.expected)


def test_traffic_is_what_it_is_said_to_be() -> None:
    made = steady(np.random.default_rng(5), 100.0)
    warm = made.ts_s > 200
    assert len(made.ts_s) / 480 == pytest.approx(100, rel=0.05)
    assert 0.005 < (~made.hits[warm]).mean() < 0.2
    assert made.expected == ()
