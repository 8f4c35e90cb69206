"""Writes ``docs/reference`` from the code: the tables from the schema, the rules from the analyzers' docstrings.

``python scripts/gen_docs.py`` rewrites the pages, ``--check`` exits with 1 and names those that are out of date.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pyarrow as pa

from spikeprof.analyzers.registry import ANALYZERS
from spikeprof.analyzers.rule_docs import introduction, rule_doc
from spikeprof.profiler.schema import SCHEMA_VERSION, TABLES

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
NOTE = "<!-- Made by `make docs`: change the code, not this page. -->\n"


def tables_page() -> str:
    """Every table of the schema with its columns, in the schema's order."""
    parts = [
        NOTE,
        "# Tables of a trace\n",
        f"Schema version {SCHEMA_VERSION}. What they have in common is in [trace-format.md](../trace-format.md).\n",
    ]
    for table in TABLES.values():
        order = f" Rows are sorted by `{table.sort_by}`." if table.sort_by else ""
        rows = [f"| `{c.name}` | {_type(c.type)} | {_cell(c.doc)} |" for c in table.columns]
        parts.append(f"## {table.name}\n\n{table.doc}{order}\n")
        parts.append("\n".join(["| column | type | meaning |", "|--|--|--|", *rows]) + "\n")
    return "\n".join(parts)


def rules_page() -> str:
    """Every analyzer with its question, tables and options, and every rule it knows."""
    parts = [
        NOTE,
        "# Analyzers and rules\n",
        "`spikeprof explain RULE` prints the same text. Limits are options of the analyzer, named here with their "
        "defaults; names end in their unit.\n",
    ]
    for analyzer in ANALYZERS:
        info = analyzer.info
        needs = ", ".join(f"`{name}`" for name in info.needs) or "none"
        wants = ", ".join(f"`{name}`" for name in info.wants)
        parts.append(f"## {info.id}\n\n{info.question}\n\n{introduction(analyzer)}\n")
        parts.append(f"Tables needed: {needs}." + (f" Used where present: {wants}." if wants else "") + "\n")
        options = [f"| `{f.name}` | {getattr(analyzer, f.name)} |" for f in dataclasses.fields(analyzer)]  # type: ignore[arg-type]
        if options:
            parts.append("\n".join(["| option | default |", "|--|--|", *options]) + "\n")
        for rule in info.rules:
            text = rule_doc(analyzer, rule.name)
            parts.append(f"### {rule.name}\n\n*{rule.severity}*: {rule.title}\n\n{text}\n")
    return "\n".join(parts)


def _type(type_: pa.DataType) -> str:
    """A dictionary column reads as strings."""
    return str(type_.value_type) if pa.types.is_dictionary(type_) else str(type_)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"tables.md": tables_page, "rules.md": rules_page}


def main(arguments: list[str]) -> int:
    """Write the pages, or with ``--check`` compare them; returns the exit code."""
    pages = {REFERENCE / name: make() for name, make in PAGES.items()}
    if arguments == ["--check"]:
        stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
        for path in stale:
            print(f"{path.name} is out of date: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    if arguments:
        print("usage: gen_docs.py [--check]", file=sys.stderr)
        return 2
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
