"""The wheel that users install: everything under ``spikeprof``, nothing beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

FOLDERS = ("profiler", "analyzers", "reports", "kernels", "cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, without network: setuptools leaves its build folders in the source tree."""
    source = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS, "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "out",
    ]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (source / "out").glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"spikeprof/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    assert sorted(wanted - inside) == []
    assert "spikeprof/profiler/inject/site/sitecustomize.py" in inside
    assert {"spikeprof/py.typed", "spikeprof/__main__.py", "spikeprof/profiler/schema.py"} <= inside


def test_nothing_else_reaches_site_packages(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"spikeprof", info}
    assert f"{info}/licenses/LICENSE" in zipfile.ZipFile(wheel).namelist()


def test_the_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """Installed into an empty environment, the command answers: its --help needs nothing but Typer."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env/bin/python"
    target = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    zipfile.ZipFile(wheel).extractall(target)
    # Dependencies come from the environment of the tests; spikeprof itself is shadowed by the wheel's.
    (Path(target) / "dependencies.pth").write_text(f"{typer_folder()}\n")
    run = subprocess.run(
        [python, "-c", "import spikeprof; print(spikeprof.__file__); from spikeprof.cli.app import main; main(['-h'])"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0].startswith(target)
    assert "analyze" in run.stdout


def typer_folder() -> Path:
    import typer

    return Path(typer.__file__).parent.parent
