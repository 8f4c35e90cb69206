"""``spikeprof report``: one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spikeprof.cli.inputs import BETWEEN_HELP, open_input


def report(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A trace folder, or a torch.profiler file (.json, .json.gz).", show_default=False
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", help="The page to write; an earlier report there is replaced."),
    ] = Path("report.html"),
    between: Annotated[str, typer.Option(metavar="BEGIN,END", help=BETWEEN_HELP)] = "",
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> int:
    """Write one HTML file that works offline and holds everything that was found."""
    from spikeprof.cli import outputs

    outputs.check(output, outputs.is_html_report)
    from spikeprof.reports.build import build_report
    from spikeprof.reports.html import write_html

    write_html(build_report(*open_input(path, between)), output)
    typer.echo(f"wrote {output}")
    if open_page:
        import webbrowser

        if not webbrowser.open(output.resolve().as_uri()):
            typer.echo("spikeprof: no browser could be started here: open the file yourself", err=True)
    return 0
