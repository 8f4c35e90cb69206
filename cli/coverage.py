"""``spikeprof coverage``: fusion coverage of one or several sources together, held against a policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spikeprof.cli.policy import POLICY_HELP

if TYPE_CHECKING:
    from spikeprof.reports.coverage import Coverage


def coverage(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Trace folders, torch.profiler files, coverage files written with -o, LCOV files (.info).",
            show_default=False,
        ),
    ],
    policy: Annotated[Path | None, typer.Option("--policy", metavar="FILE", help=POLICY_HELP)] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the merged coverage as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the merged coverage as JSON.")] = False,
) -> int:
    """Say how much of the work is done in fused kernels, over several recordings together.

    Hits of functions, lines and branches are added up, and so are time, launches and bytes.
    """
    from spikeprof.cli import outputs
    from spikeprof.reports import coverage as of
    from spikeprof.reports.coverage_policy import check, read_policy
    from spikeprof.reports.coverage_text import failures
    from spikeprof.reports.output import write_private

    if output is not None:
        outputs.check(output, outputs.is_coverage)
    bounds = read_policy(policy) if policy is not None else []
    whole = of.merged(map(_read, sources))
    if output is not None:
        write_private(output, of.encode(whole))
    checks = check(bounds, whole)
    if as_json:
        typer.echo(of.encode(whole), nl=False)
    else:
        from rich.console import Console

        from spikeprof.reports.coverage_text import render_coverage

        render_coverage(whole, checks, Console())
    reasons = failures(checks)
    for reason in reasons:
        typer.echo(f"spikeprof: --policy {policy}: {reason}", err=True)
    return 1 if reasons else 0


def _read(path: Path) -> Coverage:
    from spikeprof.reports.coverage_sources import of_trace, read_file

    found = read_file(path)
    if found is not None:
        return found
    from spikeprof.cli.inputs import open_input

    return of_trace(*open_input(path, ""))
