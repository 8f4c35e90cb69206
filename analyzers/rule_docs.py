"""The documentation of rules, taken from the docstrings of the analyzers that find them (see ``base.py``).

Texts are given as Markdown: code stands between single backquotes.
"""

from __future__ import annotations

import sys
from inspect import cleandoc

from spikeprof.analyzers.base import Analyzer


def module_doc(analyzer: Analyzer) -> str:
    """The docstring of the module that defines the analyzer, as Markdown; empty when it has none."""
    return cleandoc(sys.modules[type(analyzer).__module__].__doc__ or "").replace("``", "`")


def introduction(analyzer: Analyzer) -> str:
    """What the docstring says before its first section."""
    return _sections(module_doc(analyzer)).get("", "")


def rule_doc(analyzer: Analyzer, rule: str) -> str:
    """The section of one rule without its heading; empty when the analyzer's docstring has none."""
    return _sections(module_doc(analyzer)).get(rule, "")


def _sections(doc: str) -> dict[str, str]:
    """Heading -> text, for headings underlined with dashes; the text before the first one is under ``""``."""
    parts: dict[str, list[str]] = {"": []}
    heading = ""
    lines = doc.splitlines()
    for i, line in enumerate(lines):
        below = lines[i + 1] if i + 1 < len(lines) else ""
        if line.strip() and below and set(below) == {"-"} and len(below) >= 3:
            heading = line.strip()
            parts[heading] = []
        elif not (line and set(line) == {"-"} and len(line) >= 3):
            parts[heading].append(line)
    return {name: "\n".join(text).strip() for name, text in parts.items()}
