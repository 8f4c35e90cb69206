"""The same decision about the L2 of a recorded trace."""

from __future__ import annotations

from pathlib import Path

import typer

from spikeprof.cli.pierce_options import SEVERITIES, Thresholds, detector_options


def trace(path: Path, between: str, as_json: bool, fail_on: str, thresholds: Thresholds) -> int:
    """Print the answer and return the exit code. Raises SpikeprofError."""
    from spikeprof.analyzers.cache_pierce.traces import pierce_trace
    from spikeprof.cli.inputs import open_input
    from spikeprof.reports.pierce import trace_text

    recorded, name = open_input(path, between)
    verdict = pierce_trace(recorded, detector_options(thresholds.settings))
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(trace_text.answer(verdict, name), enc_hook=str), indent=1))
    else:
        for line in trace_text.lines(verdict, name):
            typer.echo(line)
    if not fail_on:
        return 0
    failing = SEVERITIES[SEVERITIES.index(fail_on) :]
    found = sum(alert.kind != "recovered" and alert.severity in failing for alert in verdict.alerts)
    reason = "could not look" if verdict.status == "not_measured" else f"{found} alert(s) of this severity or above"
    if not found and verdict.status != "not_measured":
        return 0
    typer.echo(f"spikeprof: --fail-on {fail_on}: {reason}", err=True)
    return 1
