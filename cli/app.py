"""The ``spikeprof`` command: one module per verb, joined here. The only place that prints errors and exits.

A verb is a function that returns an exit code (None = 0) and raises ``SpikeprofError`` for whatever the user
should be told. Everything heavy is imported inside the verb, so that ``--help`` stays quick.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from spikeprof import __version__
from spikeprof.cli import analyze, counters, coverage, doctor, explain, graph, report, run, topology
from spikeprof.profiler.counter_metrics import DEFAULT_SET, METRICS, SETS
from spikeprof.profiler.errors import OutputError, SpikeprofError, UsageError

EXIT_INTERNAL = 5
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

#: Typer brings its own copy of click in newer versions: take the base class of usage errors from Typer itself.
_ClickException: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="spikeprof",
    help="GPU profiling and bottleneck diagnosis for LLM inference.",
    epilog="Start with: spikeprof run -- python your_program.py",
    add_completion=False,
    # Plain help: importing rich for it would double the time that --help takes.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The first word that is no option of ours begins the command, with or without -- before it.
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)
app.command("analyze", short_help="Find what limits a recorded run; needs no GPU.")(analyze.analyze)
app.command("report", short_help="Write one HTML file that works offline.")(report.report)
app.command("coverage", short_help="Say how much is done in fused kernels; hold it against a policy.")(
    coverage.coverage
)
app.command("doctor")(doctor.doctor)
app.command("counters", short_help="Read counters of GPUs that are at work already.")(counters.counters)
app.command("topology", short_help="Show how the GPUs are joined, and what that suits.")(topology.topology)
app.command("graph", short_help="Read a model's graph: memory, alignment, time of its nodes.")(graph.graph)
app.command("explain")(explain.explain)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"spikeprof {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> int:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        return 2
    return 0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (``sys.argv[1:]`` by default) and exit with its code."""
    if not os.environ.get("SPIKEPROF_DEBUG"):  # libraries warn whom they serve, not the user
        warnings.simplefilter("ignore")
    sys.exit(run_command_line(argv))


def pierce_main() -> NoReturn:
    """The command ``cache_pierce_detector``: ``spikeprof pierce`` under a name of its own."""
    main(["pierce", *sys.argv[1:]])


def run_command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line; errors become one line on standard error and their exit code."""
    _make_ready("stdout", "stderr")
    try:
        code = _invoke(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except typer.Exit as end:
        code = end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = _fail("interrupted", EXIT_INTERRUPTED)
    except SpikeprofError as error:
        code = _fail(str(error), error.exit_code)
    except _ClickException as error:
        # Some versions of Typer tell whose exception it was.
        message = error.format_message().replace("Value error, ", "")
        code = _fail(f"{message} (see `{_help_of(error)}`)", UsageError.exit_code)
    except BrokenPipeError:  # the reader (head, less) went away
        _abandon_stdout()
        code = EXIT_BROKEN_PIPE
    except SystemExit:  # rich's answer to the same
        code = EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _abandon_stdout()
            code = _fail("the output cannot be written: the disk is full", OutputError.exit_code)
        else:
            code = _internal(error)
    except Exception as error:
        code = _internal(error)
    return code


def _make_ready(*names: str) -> None:
    for name in names:
        if getattr(sys, name) is None:  # started with it closed
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character gets a "?" instead of a crash
            stream.reconfigure(errors="replace")


def _invoke(arguments: list[str]) -> int:
    """Parse and run. Typer's own ``main`` would print and exit."""
    command: Any = typer.main.get_command(app)
    if not (arguments and arguments[0] in command.commands):  # its many options would hold every other verb up
        from spikeprof.cli.pierce import pierce

        command.add_command(typer.main.get_command(pierce))
    arguments = _with_default_values(command, arguments)
    with command.make_context("spikeprof", arguments) as context:
        code = command.invoke(context)
    return code if isinstance(code, int) else 0


def _with_default_values(command: Any, arguments: list[str]) -> list[str]:
    """``run --counters`` stands for ``run --counters=memory``: Typer knows no option whose value may be left out."""
    if arguments[:1] != ["run"]:
        return arguments
    options = [p for p in command.commands["run"].params if p.param_type_name == "option"]
    with_value = {name for option in options if not option.is_flag for name in option.opts}
    at = 1
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "--":
        if arguments[at] == "--counters":
            after = arguments[at + 1 : at + 2]
            if after and {*after[0].split(",")} <= {*SETS, *METRICS}:
                raise UsageError(f"--counters {after[0]}: write --counters={after[0]}, or it is taken for the command")
            return [*arguments[:at], f"--counters={DEFAULT_SET}", *arguments[at + 1 :]]
        at += 2 if arguments[at] in with_value else 1
    return arguments


def _internal(error: Exception) -> int:
    if os.environ.get("SPIKEPROF_DEBUG"):
        import traceback

        traceback.print_exception(error)
    return _fail(
        f"internal error: {type(error).__name__}: {error} (please report it; SPIKEPROF_DEBUG=1 shows where)",
        EXIT_INTERNAL,
    )


def _abandon_stdout() -> None:
    """Point stdout elsewhere, or the interpreter fails at exit to flush what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"spikeprof: {' '.join(message.split())}\n")
    return code


def _help_of(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else 'spikeprof'} --help"
