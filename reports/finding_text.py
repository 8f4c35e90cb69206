"""Findings in words: where, on what evidence, beside which limit, what it may save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spikeprof.analyzers.base import Evidence, Finding, Saving
from spikeprof.reports import format as fmt
from spikeprof.reports.kernel_names import printable, short_name

_SCOPES = {"device": "GPU", "rank": "process", "src_device": "from GPU", "dst_device": "to GPU"}


def scope(where: Mapping[str, str | int], width: int = 60) -> str:
    """``kernel gemm_…, grid 132×1×1, block 128×1×1, GPU 0``."""
    parts: dict[str, str] = {}
    for key, value in where.items():
        head, _, axis = key.partition("_")
        if head in ("grid", "block") and axis in ("x", "y", "z"):
            parts[head] = f"{parts[head]}×{value}" if head in parts else f"{head} {value}"
        elif key == "kernel":
            parts[key] = f"kernel {short_name(str(value), width)}"
        elif key == "next_kernel":
            parts[key] = f"then {short_name(str(value), width)}"
        elif key in ("resource", "limiter"):
            parts[key] = f"{'short of' if key == 'resource' else 'limited by'} {fmt.resources(str(value))}"
        elif key in ("link", "reason"):
            parts[key] = fmt.title(printable(str(value))) if key == "link" else printable(str(value))
        else:
            parts[key] = f"{_SCOPES.get(key, fmt.label(key))} {printable(str(value))}"
    return ", ".join(parts.values())


def evidence(items: Sequence[Evidence], most: int | None = None) -> str:
    """``Launch idle 15.0 % (limit 10 %), 42.5 ms; GPU idle 62.1 %``: one name for numbers of one thing."""
    parts: list[str] = []
    before: tuple[str, str] = ("", "")
    for item in items[:most]:
        name = fmt.title(item.metric)
        basis = "" if item.basis == "measured" or (name, item.basis) == before else item.basis
        notes = "; ".join(note for note in (limit(item), basis) if note)
        text = fmt.quantity(item.metric, item.value) + (f" ({notes})" if notes else "")
        if name == before[0]:
            parts[-1] += f", {text}"
        else:
            parts.append(f"{name} {text}")
        before = (name, item.basis)
    return "; ".join(parts)


def limit(item: Evidence) -> str:
    """``limit 20 %``, ``limit 4.80 TB/s, data sheet``, or ``none expected``; empty without a limit."""
    if item.limit is None:
        return ""
    source = printable(item.limit_source)
    if item.limit == 0 and source and not is_option(source):
        return source
    text = "limit " + fmt.quantity(item.metric, item.limit).replace(".0 %", " %")
    return text if not source or is_option(source) else f"{text}, {source}"


def is_option(source: str) -> bool:
    """Whether the source of a limit is the name of an analyzer's option."""
    return source.isidentifier() and "_" in source


def saving(bound: Saving) -> str:
    """``at most 0.89 s of the run``; an upper bound, never added to another."""
    whose = "of the run" if bound.of == "total" else "of this part"
    return f"at most {fmt.duration(bound.upper_bound_ns)} {whose}"


def verdict_counts(findings: list[Finding]) -> str:
    """``1 critical and 2 warnings``; empty without findings."""
    names = {"critical": ("critical", "critical"), "warning": ("warning", "warnings"), "info": ("note", "notes")}
    numbers = {severity: sum(f.severity == severity for f in findings) for severity in names}
    return fmt.joined([fmt.plural(numbers[severity], *names[severity]) for severity in names if numbers[severity]])
