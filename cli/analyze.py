"""``spikeprof analyze``: ask every analyzer, print the summary."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from spikeprof.cli.inputs import BETWEEN_HELP, open_input
from spikeprof.cli.policy import POLICY_HELP


def analyze(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A trace folder, or a torch.profiler file (.json, .json.gz).", show_default=False
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of the summary.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the report as JSON to this file, too.", metavar="FILE")
    ] = None,
    between: Annotated[str, typer.Option(metavar="BEGIN,END", help=BETWEEN_HELP)] = "",
    fail_on: Annotated[
        str,
        typer.Option(
            "--fail-on",
            metavar="WHAT",
            help="Exit with 1 on a finding of this severity (warning, critical) or above, or of these rules, comma "
            "separated.",
        ),
    ] = "",
    policy: Annotated[Path | None, typer.Option("--policy", metavar="FILE", help=POLICY_HELP)] = None,
) -> int:
    """Find what limits a recorded run; works on any machine, no GPU needed."""
    from spikeprof.cli import outputs
    from spikeprof.cli import policy as policies

    failing = policies.failing(fail_on) if fail_on else ()
    if output is not None:
        outputs.check(output, outputs.is_json_report)
    from spikeprof.reports import json_
    from spikeprof.reports.build import build_report
    from spikeprof.reports.coverage_policy import read_policy

    bounds = read_policy(policy) if policy is not None else []
    trace, name = open_input(path, between)
    report = build_report(trace, name)
    if output is not None:
        json_.write_json(report, output)
    if as_json:
        typer.echo(json_.encode(report), nl=False)
    else:
        from rich.console import Console

        from spikeprof.reports.terminal import render_terminal

        render_terminal(report, Console())
        typer.echo(f"\nnext: spikeprof report {shlex.quote(str(path))} -o report.html")
    reasons = []
    if fail_on:
        reasons += [f"--fail-on {fail_on}: {reason}" for reason in policies.violations(report, failing)]
    if bounds:
        reasons += [f"--policy {policy}: {reason}" for reason in policies.unmet(trace, name, bounds)]
    for reason in reasons:
        typer.echo(f"spikeprof: {reason}", err=True)
    return 1 if reasons else 0
