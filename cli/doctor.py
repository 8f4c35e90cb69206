"""``spikeprof doctor``: what works here for this user, driver and container, and why not."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from spikeprof.profiler.probes import Probe

_WIDTH = 80
_STATE_COLUMNS, _NAME_COLUMNS = 10, 20


def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- PYTHON",
            help="The Python, or Python script, that your program starts with; it is probed, not run.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> int:
    """Say what works here, and why not. Exit code 0: GPU work can be recorded; 1: it cannot."""
    from spikeprof.profiler.probes import can_record, machine_probes
    from spikeprof.profiler.probes_target import default_command, target_probes

    target = target_probes(command or default_command())
    probes = [*machine_probes(Path.cwd()), *target]
    recordable = can_record(probes)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode({"can_record": recordable, "probes": probes}), indent=1))
    else:
        typer.echo(_table(probes))
        typer.echo(_closing(probes, recordable))
    return 0 if recordable else 1


def _table(probes: list[Probe]) -> str:
    """One block per probe at 80 columns."""
    lines = []
    indent = " " * (_STATE_COLUMNS + _NAME_COLUMNS)
    for probe in probes:
        head = f"{probe.state:<{_STATE_COLUMNS}}{probe.name:<{_NAME_COLUMNS}}"
        lines += _wrapped(probe.detail, head, indent)
        if probe.fix:
            lines += _wrapped(f"-> {probe.fix}", indent, indent + "   ")
    return "\n".join(lines)


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    # Paths must survive: a line may be longer, but is never broken inside a word.
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def _closing(probes: list[Probe], recordable: bool) -> str:
    if recordable:
        return "\nGPU work can be recorded here. Next: spikeprof run -- python your_program.py"
    why = ", ".join(p.name for p in probes if p.needed and p.state == "no")
    return "\n" + textwrap.fill(
        f"GPU work cannot be recorded here ({why}); `spikeprof run --numerics` finds Inf and NaN in models that run on "
        "the CPU, `spikeprof analyze` and `spikeprof report` read traces from other machines all the same.",
        _WIDTH,
    )
