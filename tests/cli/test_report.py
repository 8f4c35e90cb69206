from __future__ import annotations

from pathlib import Path

import pytest
from cli.command import refusal, spikeprof
from cli.traces import launch_bound


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return launch_bound(tmp_path / "trace")


def test_the_page_is_written_private_and_may_be_replaced(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    for _ in range(2):
        run = spikeprof("report", trace, cwd=tmp_path)
        assert (run.returncode, run.stdout, run.stderr) == (0, "wrote report.html\n", "")
    assert out.read_text().startswith("<!doctype html>")
    assert out.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".*.tmp"))


def test_somebody_elses_page_stays(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text("<!doctype html><title>mine</title>")
    run = spikeprof("report", trace, "-o", page)
    assert "is not a spikeprof report and is left as it is" in refusal(run)
    assert run.returncode == 4
    assert page.read_text() == "<!doctype html><title>mine</title>"


def test_an_empty_file_may_be_filled(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "made-by-mktemp.html"
    page.touch()
    assert spikeprof("report", trace, "-o", page).returncode == 0
    assert page.stat().st_size > 0


def test_a_bad_input_leaves_the_earlier_report(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    spikeprof("report", trace, "-o", out)
    before = out.read_bytes()
    run = spikeprof("report", tmp_path / "nowhere", "-o", out)
    assert "there is no" in refusal(run)
    assert run.returncode == 3
    assert out.read_bytes() == before


def test_the_browser_is_opened_on_request_only(trace: Path, tmp_path: Path) -> None:
    seen = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {seen}\n')
    browser.chmod(0o755)
    env = {"BROWSER": str(browser)}
    assert spikeprof("report", trace, "-o", "a.html", cwd=tmp_path, env=env).returncode == 0
    assert not seen.exists()
    assert spikeprof("report", trace, "-o", "b.html", "--open", cwd=tmp_path, env=env).returncode == 0
    assert seen.read_text() == (tmp_path / "b.html").as_uri() + "\n"
