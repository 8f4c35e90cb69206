from __future__ import annotations

from cli.command import refusal, spikeprof

from spikeprof.analyzers import registry
from spikeprof.cli.explain import explain


def test_without_a_rule_all_are_listed() -> None:
    run = spikeprof("explain")
    assert run.returncode == 0
    names = [line.split()[0] for line in run.stdout.splitlines()]
    assert names == list(registry.rules())


def test_a_rule_is_explained_from_its_docstring() -> None:
    run = spikeprof("explain", "launch-bound")
    assert run.returncode == 0
    assert run.stdout.startswith("launch-bound (warning, from launch-gaps)\n")
    for paragraph in ("What it means:", "How it is found:", "What to do:"):
        assert run.stdout.count(paragraph) == 1


def test_limits_are_told_with_their_values_and_how_to_set_others() -> None:
    said = " ".join(spikeprof("explain", "leak").stdout.split())
    assert "Limits: `min_leak_dimensions_count` 3, `min_leak_headroom_bits` 8.00 bits." in said
    assert "`from spikeprof.analyzers.overflow import Overflow`" in said
    assert "Limits" not in spikeprof("explain", "nan-origin").stdout, "it has none"


def test_every_rule_can_be_explained() -> None:
    for name in registry.rules():
        assert explain(name) == 0


def test_a_close_name_is_suggested() -> None:
    run = spikeprof("explain", "launch-bond")
    assert refusal(run) == "there is no rule 'launch-bond': did you mean launch-bound?"
    assert run.returncode == 2


def test_a_far_name_gets_the_list() -> None:
    run = spikeprof("explain", "zzz")
    assert refusal(run) == "there is no rule 'zzz': `spikeprof explain` lists them"
