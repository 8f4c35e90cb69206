"""``spikeprof explain``: what a rule means, how it is found, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spikeprof.profiler.errors import UsageError

if TYPE_CHECKING:
    from spikeprof.analyzers.base import Analyzer


def explain(
    rule: Annotated[
        str, typer.Argument(metavar="RULE", help="The rule's name, as reports print it; all rules when left out.")
    ] = "",
) -> int:
    """Explain a rule: what it means, how it is found, what to do."""
    from spikeprof.analyzers import registry
    from spikeprof.analyzers.rule_docs import rule_doc

    rules = registry.rules()
    if not rule:
        width = max(map(len, rules), default=0)
        for name, (_, found) in rules.items():
            typer.echo(f"{name:<{width}}  {found.severity:<8}  {found.title}")
        return 0
    if rule not in rules:
        raise UsageError(_unknown(rule, list(rules)))
    analyzer, found = rules[rule]
    typer.echo(f"{rule} ({found.severity}, from {analyzer.info.id})\n{found.title}\n")
    text = rule_doc(analyzer, rule)
    typer.echo(_refilled("\n\n".join(filter(None, (text, _limits(analyzer, text))))))
    return 0


def _limits(analyzer: Analyzer, text: str) -> str:
    """The values of the analyzer's options that a text names, and how others are set; empty where it names none."""
    import re
    from dataclasses import fields, is_dataclass

    from spikeprof.reports import format as fmt

    known: list[str] = [option.name for option in fields(analyzer)] if is_dataclass(analyzer) else []
    named = [name for name in dict.fromkeys(re.findall(r"`(\w+)`", text)) if name in known]
    if not named:
        return ""
    values = ", ".join(f"`{name}` {fmt.quantity(name, getattr(analyzer, name))}" for name in named)
    kind = type(analyzer)
    return (
        f"Limits: {values}. Others are set in Python: `from {kind.__module__} import {kind.__name__}`, then "
        f"`{kind.__name__}({named[0]}=…).analyze(spikeprof.open_trace(TRACE))`."
    )


def _refilled(text: str) -> str:
    """Paragraphs as wide as the terminal, up to what is good to read."""
    import shutil
    import textwrap

    width = min(shutil.get_terminal_size().columns, 100)
    return "\n\n".join(textwrap.fill(paragraph, width) for paragraph in text.split("\n\n"))


def _unknown(rule: str, known: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(rule, known, n=1)
    meant = f": did you mean {close[0]}?" if close else ": `spikeprof explain` lists them"
    return f"there is no rule {rule!r}{meant}"
