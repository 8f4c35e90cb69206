from __future__ import annotations

import inspect
import re

import typer
from paths import ROOT

from spikeprof.analyzers.cache_pierce import options
from spikeprof.analyzers.cache_pierce.options import Options
from spikeprof.cli.pierce import pierce

PAGE = (ROOT / "docs" / "pierce.md").read_text(encoding="utf-8")
_FIELD = re.compile(r"    (\w+): (?:int|float) = [^#]*(?:# (.*))?")


def thresholds() -> str:
    """The table of thresholds: names, defaults and comments of the code."""
    rows: list[list[str]] = []
    for line in inspect.getsource(options).partition("__post_init__")[0].splitlines():
        if match := _FIELD.fullmatch(line):
            rows.append([match[1], f"{getattr(Options(), match[1]):,}", match[2] or ""])
        elif rows and re.match(r"    # (?!penetration|states|baseline|hot|illegal|event|bounds)", line):
            rows[-1][2] += " " + line.strip("# ")
    cells = ["| threshold | default | meaning |", "|--|--|--|"]
    return "\n".join(cells + [f"| `{name}` | {value} | {text} |" for name, value, text in rows])


def test_the_page_has_every_threshold_as_the_code_has_it() -> None:
    assert thresholds().count("\n") - 1 == len(Options.__dataclass_fields__)
    assert thresholds() in PAGE, f"write this into docs/pierce.md:\n{thresholds()}"


def test_the_page_names_options_that_exist() -> None:
    commands = typer.main.get_command(pierce).commands  # type: ignore[attr-defined]
    known = {name for command in commands.values() for option in command.params for name in option.opts}
    assert {f"`{name}`" for name in commands} - set(re.findall(r"`\w+`", PAGE)) == set()
    foreign = {"--counters", "--kv-events-config", "--help"}  # of spikeprof run, of engines
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) - known - foreign == set()
