"""``spikeprof explain``: what a rule means, how it is found, what to do."""

from __future__ import annotations

from typing import Annotated

import typer

from spikeprof.profiler.errors import UsageError


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
    typer.echo(_refilled(rule_doc(analyzer, rule)))
    return 0


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
