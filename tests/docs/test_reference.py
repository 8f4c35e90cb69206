from __future__ import annotations

import re
import subprocess
import sys

import pytest
from paths import ROOT

from spikeprof.analyzers import registry, rule_docs
from spikeprof.analyzers.base import Info

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("sample_traces/*.md")])


def test_reference_pages_are_what_the_code_says() -> None:
    check = [sys.executable, "scripts/gen_docs.py", "--check"]
    run = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page: object) -> None:
    assert hasattr(page, "read_text")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_sections_of_a_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        info = Info("asked", "Is it?", needs=())

    doc = """What it is about.

    first-rule
    ----------
    What it means: ``x`` waits.

    - a list is no heading
    --
    second-rule
    -----------
    Short.
    """
    monkeypatch.setattr(sys.modules[__name__], "__doc__", doc)
    asked: registry.Analyzer = Asked()  # type: ignore[assignment]
    assert rule_docs.introduction(asked) == "What it is about."
    assert rule_docs.rule_doc(asked, "first-rule") == "What it means: `x` waits.\n\n- a list is no heading\n--"
    assert rule_docs.rule_doc(asked, "second-rule") == "Short."
    assert rule_docs.rule_doc(asked, "no-such-rule") == ""
