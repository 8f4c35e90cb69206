"""Coverage and its policy in words: a table for the terminal, and a sentence for each bound that does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from spikeprof.reports import format as fmt
from spikeprof.reports.coverage import Coverage, Share, shares
from spikeprof.reports.coverage_policy import Bound, Check
from spikeprof.reports.kernel_names import clip, printable

_MAX_SOURCES = 4


def render_coverage(of: Coverage, checks: Sequence[Check], console: Console) -> None:
    """Print every measure, what it was made of and, where a policy was given, its bound and whether it holds."""
    console.print(_heading(of), markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("measure", no_wrap=True)
    for heading in ("value", "covered", *(("required", "") if checks else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    held: Mapping[str, Check] = {one.bound.measure: one for one in checks}
    found = shares(of)
    for name, share in found.items():
        row = [name, fmt.ABSENT if share.value is None else fmt.share(share.value), _parts(name, share)]
        if checks:
            row += [_required(held[name].bound), "ok" if held[name].passed else "FAILED"] if name in held else ["", ""]
        table.add_row(*row)
    console.print(table)
    for why, names in _reasons(found).items():
        console.print(f"{fmt.joined(names)}: {fmt.not_measured(why)}", markup=False, highlight=False)


def _heading(of: Coverage) -> str:
    names = [printable(name) for name in of.sources]
    shown = ", ".join(names[:_MAX_SOURCES]) + (f" and {len(names) - _MAX_SOURCES} more" if names[_MAX_SOURCES:] else "")
    return clip(f"Fusion coverage of {shown or 'nothing'}", 100)


def _parts(name: str, share: Share) -> str:
    """``17.6 ms of 118 ms``, ``3 of 12``."""
    if share.value is None:
        return ""
    show = {"time": fmt.duration, "bytes": fmt.size}.get(name.rpartition(".")[2], fmt.count)
    return f"{show(share.covered)} of {show(share.total)}"


def _required(bound: Bound) -> str:
    ends = (("≥", bound.least), ("≤", bound.most))
    return ", ".join(f"{sign} {fmt.share(end)}".replace(".0 %", " %") for sign, end in ends if end is not None)


def _reasons(found: Mapping[str, Share]) -> dict[str, list[str]]:
    by_reason: dict[str, list[str]] = {}
    for name, share in found.items():
        if share.value is None:
            by_reason.setdefault(share.reason, []).append(name)
    return by_reason


def failures(checks: Sequence[Check]) -> list[str]:
    """One sentence for each bound that does not hold."""
    return [_failure(one) for one in checks if not one.passed]


def _failure(one: Check) -> str:
    name, value = one.bound.measure, one.share.value
    if value is None:
        return f"{name} was {fmt.not_measured(one.share.reason)}"
    return f"{name} is {fmt.share(value)}, required: {_required(one.bound)}"
