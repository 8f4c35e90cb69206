"""What every analyzer in the registry must keep to. A new analyzer is tested here without a line being added."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import msgspec
import pytest
import tiny

from spikeprof.analyzers import derived
from spikeprof.analyzers.base import Analyzer, Result
from spikeprof.analyzers.registry import ANALYZERS, rules
from spikeprof.analyzers.rule_docs import introduction, rule_doc
from spikeprof.analyzers.runner import run_analyzers, run_one
from spikeprof.profiler.schema import TABLES
from spikeprof.profiler.trace import Trace
from spikeprof.profiler.units import unit_of

HEADINGS = ("What it means:", "How it is found:", "What to do:")
STATUSES = {"ok", "findings", "not_measured", "not_applicable", "error"}
MOST_ROWS = 2_000  # of a table that is printed, drawn and put into JSON

every_analyzer = pytest.mark.parametrize("analyzer", ANALYZERS, ids=lambda a: a.info.id)
every_rule = pytest.mark.parametrize("name", rules())


def full_trace() -> Trace:
    """Two processes on two devices with something in every table."""
    kernels, calls, copies = [], [], []
    for i in range(200):
        rank, now = i % 2, 10_000 * i
        same: dict[str, Any] = {"rank": rank, "device": rank, "correlation_id": i + 1}
        graph = {"graph_id": 3, "graph_node_id": i % 4 + 1} if i % 5 == 0 else {}
        table = copies if i % 10 == 9 else kernels
        table.append({**same, **graph, "start_ns": now + 4000, "end_ns": now + 5000 + i * 10, "stream": i % 3})
        if table is kernels:
            table[-1]["name"] = f"kernel_{i % 30}"
        name = "cudaMemcpyAsync" if i % 10 == 9 else "cudaLaunchKernel"
        calls.append({"rank": rank, "correlation_id": i + 1, "start_ns": now, "end_ns": now + 3000, "name": name})
    other = {
        name: [{}] for name in TABLES if name not in ("kernels", "memory_ops", "runtime_calls", "windows", "steps")
    }
    windows = [{"rank": r, "start_ns": 0, "end_ns": 1_500_000, "state": "traced"} for r in (0, 1)]
    windows += [{"rank": r, "start_ns": 1_500_000, "end_ns": 2_000_000, "state": "clean"} for r in (0, 1)]
    ends = ((0, 1), (1, 0), (0, -1), (-1, 0), (1, -1), (-1, 1))
    other["topology"] = [
        {"src_device": a, "dst_device": b, "kind": "pcie", "links_count": 8, "max_links_count": 16}
        | {"peak_bytes_per_s": 32e9, "measured_bytes_per_s": 8e9, "peer_access": "not supported" if a >= 0 <= b else ""}
        for a, b in ends
    ]
    steps = [{"start_ns": i, "traced": i % 20 < 10, "duration_ns": 100 + i % 3} for i in range(40)]
    return tiny.trace(
        duration_ns=2_000_000,
        kernels=kernels,
        memory_ops=copies,
        runtime_calls=calls,
        windows=windows,
        steps=steps,
        **other,
    )


def empty_trace() -> Trace:
    """Everything collected, nothing happened."""
    return tiny.trace(**{name: [] for name in TABLES})


@pytest.fixture(scope="module", params=["full", "empty", "none"])
def trace(request) -> Trace:
    return {"full": full_trace, "empty": empty_trace, "none": tiny.trace}[request.param]()


# -- what it declares ----------------------------------------------------------------------------------------------


@every_analyzer
def test_info_is_complete(analyzer: Analyzer):
    info = analyzer.info
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", info.id)
    assert type(analyzer).__module__ == f"spikeprof.analyzers.{info.id.replace('-', '_')}"
    assert info.question.endswith("?")
    assert set(info.needs) | set(info.wants) <= set(TABLES)
    assert not set(info.needs) & set(info.wants)
    assert introduction(analyzer)
    assert analyzer.analyze.__doc__


@every_analyzer
def test_options_are_documented_frozen_and_have_defaults(analyzer: Analyzer):
    assert dataclasses.is_dataclass(analyzer)
    assert analyzer.__dataclass_params__.frozen
    assert type(analyzer)() == analyzer  # the registry holds the defaults
    assert type(analyzer).__doc__.startswith("Option")
    for option in dataclasses.fields(analyzer):
        assert unit_of(option.name), f"the option {option.name} does not end in its unit"


@every_analyzer
def test_ids_and_rules_are_unique(analyzer: Analyzer):
    assert Counter(a.info.id for a in ANALYZERS)[analyzer.info.id] == 1
    names = Counter(rule.name for a in ANALYZERS for rule in a.info.rules)
    assert all(names[rule.name] == 1 for rule in analyzer.info.rules)


@every_rule
def test_every_rule_is_documented(name: str):
    analyzer, rule = rules()[name]
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z][a-z0-9]*)*", name)
    assert rule.title
    assert not rule.title.endswith(".")
    assert not re.search(r"\b\d", rule.title)  # L2 is a name
    assert rule.severity in ("info", "warning", "critical")
    text = rule_doc(analyzer, name)
    places = [text.find(heading) for heading in HEADINGS]
    assert -1 not in places, f"{name}: the section lacks one of {HEADINGS}"
    assert places == sorted(places)


@every_rule
def test_options_that_a_rule_names_exist(name: str):
    analyzer, _ = rules()[name]
    options = {option.name for option in dataclasses.fields(analyzer)}
    named = set(re.findall(r"``([a-z0-9_]+)``", rule_doc(analyzer, name)))
    assert {word for word in named if unit_of(word)} <= options


# -- what it answers -----------------------------------------------------------------------------------------------


@every_analyzer
def test_results_are_well_formed(analyzer: Analyzer, trace: Trace):
    result = run_one(trace, analyzer)
    assert result.analyzer == analyzer.info.id
    assert result.status in STATUSES - {"error"}, result.reason
    assert (result.status == "findings") == bool(result.findings)
    if result.status in ("not_measured", "not_applicable"):
        assert result.reason
    check_metrics(result)
    check_tables(result)
    check_findings(analyzer, result)
    again = msgspec.json.decode(msgspec.json.encode(result), type=Result)
    assert (again.status, again.metrics) == (result.status, result.metrics)


def check_metrics(result: Result) -> None:
    for metric in result.metrics:
        assert unit_of(metric.name), f"the metric {metric.name} does not end in its unit"
        assert (metric.value is None) == bool(metric.reason), metric
        assert metric.value is None or type(metric.value) in (int, float), metric
    assert max(Counter(m.name for m in result.metrics).values(), default=1) == 1


def check_tables(result: Result) -> None:
    for name, table in result.tables.items():
        lengths = {column: len(values) for column, values in table.items()}
        assert len(set(lengths.values())) == 1, f"{name}: columns of different length {lengths}"
        assert max(lengths.values()) <= MOST_ROWS, name
        for column, values in table.items():
            kinds = {type(value) for value in values} - {type(None)}
            assert kinds <= {int, float, str, bool}, f"{name}.{column} holds {kinds}"
    for figure in result.figures:
        table = result.tables[figure.table]
        named = {figure.x, figure.y, figure.value, figure.series} - {""}
        assert named <= set(table), f"{figure.id} names columns that {figure.table} lacks"


def check_findings(analyzer: Analyzer, result: Result) -> None:
    for finding in result.findings:
        assert finding.rule in {rule.name for rule in analyzer.info.rules}
        assert finding.recommendation.endswith(".")
        assert finding.evidence
        for evidence in finding.evidence:
            assert unit_of(evidence.metric), f"the evidence {evidence.metric} does not end in its unit"
            assert type(evidence.value) in (int, float)
            assert (evidence.limit is None) == (evidence.limit_source == "")
        assert finding.saving is None or finding.saving.upper_bound_ns >= 0


@every_analyzer
def test_every_needed_table_that_is_missing_is_named_with_what_collects_it(analyzer: Analyzer):
    whole = full_trace()
    for missing in analyzer.info.needs:
        part = dataclasses.replace(whole, tables={n: t for n, t in whole.tables.items() if n != missing})
        result = run_one(part, analyzer)
        assert result.status == "not_measured"
        assert missing in result.reason
        assert result.collect_with


@every_analyzer
def test_any_wanted_table_may_be_missing_empty_or_damaged(analyzer: Analyzer):
    whole = full_trace()
    for wanted in analyzer.info.wants:
        rest = {n: t for n, t in whole.tables.items() if n != wanted}
        for tables, damaged in ((rest, {}), ({**rest, wanted: TABLES[wanted].empty()}, {}), (rest, {wanted: "torn"})):
            result = run_one(dataclasses.replace(whole, tables=tables, damaged=damaged), analyzer)
            assert result.status != "error", f"without {wanted}: {result.reason}"
            check_metrics(result)
            check_tables(result)


@every_analyzer
def test_it_reads_only_what_it_declared_and_changes_nothing(analyzer: Analyzer):
    trace = full_trace()
    declared = {*analyzer.info.needs, *analyzer.info.wants}
    before = {name: trace.table(name) for name in declared}
    copies = {name: table.to_pydict() for name, table in before.items()}
    first = analyzer.analyze(trace.restricted(declared))
    assert {name: trace.table(name).to_pydict() for name in declared} == copies
    assert analyzer.analyze(trace.restricted(declared)) == first  # no state, no chance


@every_analyzer
def test_chunked_tables_give_the_same_answer(analyzer: Analyzer):
    import pyarrow as pa

    whole = full_trace()
    halves = {}
    for name in whole.tables:
        table = whole.table(name)
        middle = table.num_rows // 2
        halves[name] = pa.concat_tables([table.slice(0, middle), table.slice(middle)])
    assert run_one(dataclasses.replace(whole, tables=halves), analyzer) == run_one(whole, analyzer)


def test_a_fault_in_one_analyzer_does_not_stop_the_others():
    class Broken:
        info = ANALYZERS[0].info

        def analyze(self, trace: Trace) -> Result:
            return 1 / 0  # type: ignore[return-value]

    results = run_analyzers(full_trace(), [Broken(), *ANALYZERS])
    assert [r.status == "error" for r in results] == [True] + [False] * len(ANALYZERS)
    assert "ZeroDivisionError" in results[0].reason


def test_findings_occur_on_the_full_trace():
    """Else the checks of findings above would check nothing."""
    assert sum(len(result.findings) for result in run_analyzers(full_trace(), ANALYZERS)) >= 2


def test_what_is_derived_is_listed():
    assert derived.__all__ == sorted(derived.__all__, key=lambda n: (n.upper() != n, n[0].islower(), n))
    assert all(hasattr(derived, name) for name in derived.__all__)
