"""Where numbers leave their format, or are about to: Inf and NaN, headroom, end codes, subnormals, zeros.

The numbers are those of `spikeprof run --numerics`: a scan of what watched modules give (inputs, weights, gradients and
KV pages on request), on the device, in the order in which it ran, also in replays of CUDA graphs. *Headroom* is
log2(limit / amax): how often the largest finite magnitude can double before it does not fit. It is told for FP16, BF16
and FP32. FP8 and integer tensors are scaled to fill their format: of these the share of elements at the largest number
or at the end codes is told instead. The limits of each format are in ``numerics_formats.toml``, with their sources.

A *watched tensor* is what one module hands on or takes in one format, in all steps and processes together. One finding
is made for each rule and module; its step is the first one, its numbers are those of the worst scan. Modules that the
collector could not look into are named in its note. Where only every Nth step was scanned, a bad step may have been
preceded by others that were not looked at.

overflow
--------
What it means: a tensor holds Inf or NaN. All that is computed from it is lost, mostly without an error.

How it is found: a scan counted any of either. There is a finding for each module that was the first in some step;
those that only took it over, also from the step before, are in the table. Masks that a program adds on purpose as -Inf
count, too, where they are handed from module to module.

What to do: begin with the module of ``nan-origin``. Keep what overflows in BF16 or FP32, or scale it by a power of two
and undo that where the sum is in FP32.

near-overflow
-------------
What it means: magnitudes come close to the largest number of the format. A longer prompt or an unusual token may pass
it.

How it is found: headroom below ``min_headroom_bits``, or in FP16 an amax of ``fp16_warn_value`` or more (FP16 ends at
``fp16_limit_value``). In FP8: at least ``max_saturated_share`` of the elements are at the largest number. Of quantised
tensors whose scale is known, the same of what the codes stand for at most, in the format of the scale: the largest code
times the largest scale.

What to do: keep the tensor in BF16 or FP32, or scale it by a power of two; FP8: choose a larger scale.

int8-saturation
---------------
What it means: many elements of an INT8, UINT8 or INT4 tensor are at the end codes: larger values were cut off.

How it is found: at least ``max_saturated_share`` of the elements, and more than two of each row, which a scale of the
row's own puts there by intention, are at the lowest or highest code; of KV pages
``max_kv_saturated_share``, since there the least and the largest element of each head are at the ends by intention; of
4-bit tensors ``max_int4_saturated_share``.

What to do: calibrate the scale anew, by channel or group, or leave outliers in a wider format.

underflow
---------
What it means: values are too small for the format, or for the scale of an integer tensor, and become zero.

How it is found: at least ``min_lost_share`` of the elements are zero and as large a share of the others is subnormal;
or the share of zeros has grown by ``max_zero_growth_share`` from the first to the last quarter of the steps; or
``max_integer_zero_share`` of the codes of a signed integer tensor are zero.

What to do: scale up before the conversion (loss scaling, a norm's input), or use BF16, whose smallest number is 2^-133.

subnormal-heavy
---------------
What it means: much of a tensor is below the smallest normal number, where fewer and fewer bits are left.

How it is found: at least ``max_subnormal_share`` of the elements that are not zero are subnormal.

What to do: scale up, or use BF16 or FP32. In a norm of small variance compute the statistics in FP32.

nan-origin
----------
What it means: the module that is named was the first to give Inf or NaN; what is bad after it in the step took it over.

How it is found: in the first bad step of a process, the first bad scan in execution order: all scans of the step before
it were fine, so were, of what is watched, its inputs. What runs between two watched modules counts for the later one.

The *operator* is the first one in it that gave a bad value from fine ones, when its operators were run again at the end
of the program on an input that was kept: of that step, or of a later one in which it happened again (what was seen then
is inferred). Inf that the module puts in by intention, as a mask, does not count as bad. Where it is not known, the
table of the operator says why not.

What to do: look at this module and at the magnitude of what it takes; the others need no change.

leak
----
What it means: bad values passed from one row of the batch to others: one request spoils what others get.

How it is found: rows of a tensor are bad that were fine in all scans of the step before it, while rows that had been
bad before are bad in it, too; or, in a step that begins with bad rows of the step before it, there are more of them. A
row is an index of the leading dimension, which is taken for the batch in tensors of ``min_leak_dimensions_count``
dimensions and more; set it to 2 for flat tensors of one token of each request, and beyond all tensors' to look for no
leaks. It is inferred, and critical where the scan before leaves ``min_leak_headroom_bits``: with 8 bits in FP16 even a
square would fit; with less, or where that is not known, the victims may have overflowed by themselves: a warning. So
it is at modules that cannot mix rows (Linear, norms, activations): what runs before them may, or their weight is bad.
Where their inputs were scanned, too, they are left out.

What to do: look for what mixes rows: a mean or scale over the batch, a softmax over the wrong dimension, a shared slot
of a KV cache.

overflow-trend
--------------
What it means: the largest magnitude grows from step to step, and would pass the limit if it went on so.

How it is found: the slope of log2(amax) over at least ``min_trend_steps_count`` steps by Theil and Sen; the test of
Mann and Kendall at ``min_confidence_share``, and tau of at least ``min_trend_ratio``; the limit is reached within
``horizon_ratio`` times as many steps as were seen.

What to do: find out what accumulates (a residual stream, a state, a cache that is not reset), and bound it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np

from spikeprof.analyzers.base import Evidence, Figure, Finding, Info, Result, Rule
from spikeprof.analyzers.derived.intervals import Bools, Ints
from spikeprof.analyzers.derived.numerics_evidence import (
    bad_evidence,
    near_evidence,
    origin_evidence,
    saturated_evidence,
    subnormal_evidence,
    trend_evidence,
    zero_evidence,
)
from spikeprof.analyzers.derived.numerics_formats import Floats
from spikeprof.analyzers.derived.numerics_heat import MODEL, heat_table
from spikeprof.analyzers.derived.numerics_leak import Leak, leak_action, leak_evidence, leak_table, leaks, rows_text
from spikeprof.analyzers.derived.numerics_operator import (
    Operators,
    operator_evidence,
    operator_scope,
    operator_table,
    operators_of,
    with_taken,
)
from spikeprof.analyzers.derived.numerics_origin import Origin, bad_steps, origins
from spikeprof.analyzers.derived.numerics_scaled import scaled, scaled_evidence
from spikeprof.analyzers.derived.numerics_scans import (
    Scans,
    Tensor,
    Totals,
    first_by_tensor,
    in_order,
    scans_of,
    steps_by_tensor,
    totals,
)
from spikeprof.analyzers.derived.numerics_tables import around_table, bad_step_table, metrics, module_table, trend_table
from spikeprof.analyzers.derived.numerics_trend import Trend, last_scans, trends, zero_growth
from spikeprof.analyzers.derived.numerics_words import (
    AFTER_SCALE,
    RECALIBRATE,
    SCALE_UP,
    after_overflow,
    before_overflow,
    source_action,
)
from spikeprof.profiler.trace import Trace

_Found = TypeVar("_Found", Leak, Origin)


@dataclass(frozen=True)
class Overflow:
    """Options: limits of the rules (magnitudes without unit), and sizes of the tables."""

    fp16_limit_value: float = 65_504.0
    fp16_warn_value: float = 60_000.0
    min_headroom_bits: float = 1.0
    min_leak_headroom_bits: float = 8.0
    min_leak_dimensions_count: int = 3
    max_saturated_share: float = 0.01
    max_kv_saturated_share: float = 0.05
    max_int4_saturated_share: float = 0.25
    min_lost_share: float = 0.01
    max_zero_growth_share: float = 0.25
    max_integer_zero_share: float = 0.9
    max_subnormal_share: float = 0.1
    min_trend_steps_count: int = 16
    min_trend_ratio: float = 0.5
    min_confidence_share: float = 0.99
    horizon_ratio: float = 10.0
    top_count: int = 200
    heat_rows_count: int = 40
    heat_bins_count: int = 50
    before_count: int = 20
    victims_count: int = 3  # of those that are shown after the first bad one
    max_findings_count: int = 3  # of one rule

    info: ClassVar[Info] = Info(
        id="overflow",
        question="Where are FP16, BF16, FP8 or INT8 values about to overflow, and where did bad ones come from?",
        needs=("tensor_stats",),
        wants=("bad_operators",),
        rules=(
            Rule("overflow", "A tensor holds Inf or NaN", "critical"),
            Rule("nan-origin", "This module was the first to give Inf or NaN", "critical"),
            Rule("leak", "Bad values pass from one row of the batch to others", "critical"),
            Rule("near-overflow", "Magnitudes come close to the largest number of the format", "warning"),
            Rule("overflow-trend", "Magnitudes grow towards the largest number of the format", "warning"),
            Rule("int8-saturation", "Many elements of a quantised tensor are at its end codes", "warning"),
            Rule("underflow", "Values are too small for the format and become zero", "warning"),
            Rule("subnormal-heavy", "Much of a tensor is below the smallest normal number", "info"),
        ),
    )

    def analyze(self, trace: Trace) -> Result:
        """Answer the question. ``not_applicable`` when no tensor was scanned."""
        scans = scans_of(trace, self.fp16_limit_value)
        if not len(scans):
            return Result(self.info.id, "not_applicable", reason=_why_nothing(trace))
        found, bad = totals(scans), bad_steps(scans)
        sources, rising = list(origins(scans, bad)), self._trends(scans)
        leaked = leaks(scans, self.min_leak_dimensions_count)
        operators = operators_of(trace)
        findings = (
            *self._origins(scans, sources, operators),
            *self._overflows(scans, found, bad.first[~bad.brought_in]),
            *self._leaks(scans, leaked),
            *self._near(scans, found),
            *self._near_scaled(scans, found),
            *self._rising(scans, rising),
            *self._saturated(scans, found),
            *self._lost(scans, found),
            *self._subnormal(scans, found),
        )
        first = sources[0] if sources else None
        operator = operators.of(scans, first) if first else None
        around = around_table(scans, first, self.before_count, self.victims_count)
        note = trace.manifest.collectors.get("numerics")
        return Result(
            self.info.id,
            "findings" if findings else "ok",
            reason=note.reason if note else "",
            metrics=tuple(metrics(scans, found, len(bad.first), note)),
            findings=findings,
            tables={
                "tensors": module_table(scans, found, self.top_count),
                "around": with_taken(around, scans, first, operator, self.fp16_limit_value),
                "operator": operator_table(operator),
                "bad_steps": bad_step_table(scans, bad, self.top_count),
                "leaks": leak_table(scans, leaked, self.top_count),
                "trends": trend_table(scans, rising, self.top_count),
                "heat": heat_table(scans, scans.unscaled, self.heat_rows_count, self.heat_bins_count),
            },
            figures=(Figure("headroom", "heatmap", "heat", x="step", y="module", value="headroom_bits"),),
        )

    # ---------------------------------------------------------------- bad values

    def _origins(self, scans: Scans, sources: list[Origin], operators: Operators) -> Iterator[Finding]:
        """One for each module that was the first in some process."""
        for same in _by_module(scans, sources)[: self.max_findings_count]:
            operator = operators.of(scans, same[0])
            evidence = [*origin_evidence(scans, same[0])]
            evidence += operator_evidence(operator, evidence)
            if len(same) > 1:
                evidence.append(Evidence("processes_count", len(same)))
            told = self._finding(scans, "nan-origin", same[0].scan, evidence, source_action(scans, same[0]))
            yield replace(told, scope={**told.scope, **operator_scope(operator)})

    def _overflows(self, scans: Scans, found: Totals, firsts: Ints) -> Iterator[Finding]:
        """Of tensors that were the first in some step; victims alone stay in the table."""
        was_first = np.isin(np.arange(len(scans.tensors)), scans.tensor[firsts])
        first = first_by_tensor(scans, scans.bad)
        for tensor in self._named(scans, was_first, in_order(scans, first)):
            action = after_overflow(scans.tensors[tensor], bool(found.inf[tensor]))
            yield self._finding(scans, "overflow", int(first[tensor]), bad_evidence(found, tensor), action)

    def _leaks(self, scans: Scans, found: list[Leak]) -> Iterator[Finding]:
        """One for each module in which rows turned bad by others."""
        least = self.min_leak_headroom_bits
        by_step = sorted(found, key=lambda one: int(scans.step[one.scan]))
        for same in _by_module(scans, by_step)[: self.max_findings_count]:
            first = same[0]
            evidence = leak_evidence(scans, same, least)
            told = self._finding(scans, "leak", first.scan, evidence, leak_action(scans, first, least))
            named = (("victim_rows", first.victims), ("poisoning_rows", first.sources))
            rows = {name: rows_text(mask, first.rows_count) for name, mask in named}
            severity = told.severity if first.is_clear(scans, least) else "warning"
            yield replace(told, severity=severity, scope={**told.scope, **rows})

    # ---------------------------------------------------------------- near the limit

    def _near(self, scans: Scans, found: Totals) -> Iterator[Finding]:
        """By headroom; only of formats whose headroom says something."""
        fp16 = scans.unscaled & scans.which(lambda one: one.format is not None and one.format.name == "float16")
        close = scans.unscaled[scans.tensor] & (scans.headroom < self.min_headroom_bits)
        close |= fp16[scans.tensor] & (scans.amax >= self.fp16_warn_value)
        first, steps = first_by_tensor(scans, close), steps_by_tensor(scans, close)
        for tensor in self._named(scans, steps > 0, found.least_headroom):
            at_warning = fp16[tensor] and found.amax[tensor] >= self.fp16_warn_value
            limit = self._limit("fp16_warn_value") if at_warning else ()
            headroom = self._limit("min_headroom_bits")
            evidence = near_evidence(found, tensor, int(steps[tensor]), limit, headroom)
            action = before_overflow(scans.tensors[tensor])
            yield self._finding(scans, "near-overflow", int(first[tensor]), evidence, action)

    def _near_scaled(self, scans: Scans, found: Totals) -> Iterator[Finding]:
        """By what the codes of quantised tensors stand for, where their scale is known."""
        real = scaled(scans, self.min_headroom_bits)
        for tensor in self._named(scans, real.near_steps > 0, real.headroom):
            evidence = scaled_evidence(found, real, tensor, self.min_headroom_bits)
            told = self._finding(scans, "near-overflow", int(real.first[tensor]), evidence, AFTER_SCALE)
            yield replace(told, scope={**told.scope, "real_dtype": scans.real_dtype[tensor]})

    def _trends(self, scans: Scans) -> list[Trend]:
        """Those that are significant, and would pass the limit soon."""
        return [
            one
            for one in trends(scans, self.min_trend_steps_count, self.min_confidence_share)
            if one.confidence >= self.min_confidence_share
            and one.tau >= self.min_trend_ratio
            and 0 < one.overflow_step - one.last_step <= self.horizon_ratio * one.steps_count
        ]

    def _rising(self, scans: Scans, rising: list[Trend]) -> Iterator[Finding]:
        by_tensor = {one.tensor: one for one in rising}
        soon = np.array(
            [by_tensor[at].overflow_step if at in by_tensor else np.inf for at in range(len(scans.tensors))]
        )
        for tensor in self._named(scans, np.isfinite(soon), soon):
            one = by_tensor[tensor]
            limits = self._limit("min_confidence_share"), self._limit("min_trend_ratio")
            evidence = trend_evidence(scans, one, *limits)
            action = "Find out what accumulates in it from step to step, and bound or reset that."
            yield self._finding(scans, "overflow-trend", one.last_scan, evidence, action)

    # ---------------------------------------------------------------- end codes, subnormals, zeros

    def _end_codes(self, one: Tensor) -> tuple[float, str]:
        """The limit of the share of elements at the ends of a scaled format, and the option that it is."""
        if one.format is None or not one.format.scaled:
            return np.inf, ""
        if one.format.codes_bits == 4:
            return self._limit("max_int4_saturated_share")
        return self._limit("max_kv_saturated_share" if one.role == "kv" else "max_saturated_share")

    def _saturated(self, scans: Scans, found: Totals) -> Iterator[Finding]:
        limit = [self._end_codes(one) for one in scans.tensors]
        over = scans.saturated_share >= np.array([share for share, _ in limit])[scans.tensor]
        over &= scans.saturated_share > scans.two_of_a_row_share
        first, steps = first_by_tensor(scans, over), steps_by_tensor(scans, over)
        codes = scans.which(lambda one: one.format is not None and one.format.is_integer)
        for rule, which in (("int8-saturation", codes), ("near-overflow", ~codes)):
            for tensor in self._named(scans, (steps > 0) & which, -found.saturated_share):
                evidence = saturated_evidence(found, tensor, int(steps[tensor]), limit[tensor])
                yield self._finding(scans, rule, int(first[tensor]), evidence, RECALIBRATE)

    def _subnormal(self, scans: Scans, found: Totals) -> Iterator[Finding]:
        many = scans.subnormal_share >= self.max_subnormal_share
        first, steps = first_by_tensor(scans, many), steps_by_tensor(scans, many)
        for tensor in self._named(scans, steps > 0, -found.subnormal_share):
            limit = self._limit("max_subnormal_share")
            evidence = subnormal_evidence(found, tensor, int(steps[tensor]), limit)
            yield self._finding(scans, "subnormal-heavy", int(first[tensor]), evidence, SCALE_UP)

    def _lost(self, scans: Scans, found: Totals) -> Iterator[Finding]:
        """By the share of zeros: floats with as many subnormals, signed codes of which most are 0, zeros that grow."""
        signed = scans.which(lambda one: one.format is not None and (one.format.lowest or 0) < 0)
        lost = (scans.zero_share >= self.min_lost_share) & (scans.subnormal_share >= self.min_lost_share)
        lost |= signed[scans.tensor] & (scans.zero_share >= self.max_integer_zero_share)
        first, steps, growth = first_by_tensor(scans, lost), steps_by_tensor(scans, lost), zero_growth(scans)
        grown = growth >= self.max_zero_growth_share
        first = np.where(first >= 0, first, last_scans(scans))
        for tensor in self._named(scans, (steps > 0) | grown, -found.zero_share):
            option = "max_integer_zero_share" if signed[tensor] else "min_lost_share"
            evidence = [
                *zero_evidence(found, tensor, self._limit(option) if steps[tensor] else (), bool(signed[tensor]))
            ]
            if grown[tensor]:
                limit = self._limit("max_zero_growth_share")
                evidence.insert(0, Evidence("zero_growth_share", float(growth[tensor]), *limit))
            action = RECALIBRATE if signed[tensor] else SCALE_UP
            yield self._finding(scans, "underflow", int(first[tensor]), evidence, action)

    # ---------------------------------------------------------------- all rules

    def _limit(self, option: str) -> tuple[float, str]:
        """An option, and its name, as evidence tells them."""
        return float(getattr(self, option)), option

    def _named(self, scans: Scans, which: Bools, order: Floats) -> Iterator[int]:
        """The chosen watched tensors by ``order``, ascending: one of each module, no more than are to be named."""
        seen: set[str] = set()
        for tensor in np.argsort(order, kind="stable").tolist():
            path = scans.tensors[tensor].path
            if which[tensor] and path not in seen:
                seen.add(path)
                yield tensor
                if len(seen) == self.max_findings_count:
                    return

    def _finding(self, scans: Scans, rule: str, scan: int, evidence: Iterable[Evidence], action: str) -> Finding:
        severity = next(one.severity for one in self.info.rules if one.name == rule)
        tensor = scans.tensors[scans.tensor[scan]]
        scope: dict[str, str | int] = {"module": tensor.path or MODEL}
        if tensor.role != "output":
            scope["role"] = tensor.role
        scope |= {"dtype": tensor.dtype, "step": int(scans.step[scan])}
        if scans.rank[0] != scans.rank[-1]:
            scope["rank"] = int(scans.rank[scan])
        return Finding(rule, severity, scope, tuple(evidence), action)


def _why_nothing(trace: Trace) -> str:
    """Why no tensor was scanned, as far as the recording tells: patterns that match no module are the usual reason."""
    note, patterns = trace.manifest.collectors.get("numerics"), trace.manifest.options.get("numerics_modules", "")
    why = note.reason if note else ""
    if patterns not in ("", "['*']"):
        why = why or f"modules were picked by {patterns.strip('[]')}"
    return "no watched tensor was scanned while recording" + (f": {why}" if why else "")


def _by_module(scans: Scans, found: Iterable[_Found]) -> list[list[_Found]]:
    """Those of one module together, in the order of the first of each."""
    alike: dict[str, list[_Found]] = {}
    for one in found:
        alike.setdefault(scans.tensors[scans.tensor[one.scan]].path, []).append(one)
    return list(alike.values())
