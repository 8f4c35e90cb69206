from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli.command import Here, refusal, runner, spikeprof
from collectors import graph_models

from spikeprof.profiler import store
from spikeprof.profiler.collecting import _interpreter

MODELS = str(Path(graph_models.__file__))
LAYERS = [
    {"name": "x", "op": "input", "shape": [8, 64], "dtype": "float16"},
    {"name": "up", "op": "aten::mm", "inputs": ["x"], "shape": [8, 50257], "dtype": "float16", "module": "head"},
    {"name": "out", "op": "output", "inputs": ["up"]},
]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    return runner(monkeypatch, capfd)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"nodes": LAYERS}))
    return path


def test_a_graph_from_a_file_for_people(graph: Path) -> None:
    run = spikeprof("graph", graph)
    assert run.returncode == 0
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    assert lines[:2] == ["graph.json", "1 operator (3 nodes, the longest chain 3) by a JSON file"]
    assert "Weights 0 B, inputs 1.00 KiB, all other tensors at most 785 KiB at once." in lines
    assert "head: up                  8×50257  float16  785 KiB    100 % ████████" in lines
    assert max(map(len, lines)) <= 80


def test_a_graph_for_programs(here: Here, graph: Path) -> None:
    answer = json.loads(here("graph", graph, "--json").stdout)
    assert [node["name"] for node in answer["nodes"]] == ["x", "up", "out"]
    assert answer["edges"] == [
        {"src_node_id": 0, "dst_node_id": 1, "position": 0},
        {"src_node_id": 1, "dst_node_id": 2, "position": 0},
    ]
    assert answer["tensors"][1]["shape"] == "[8, 50257]"
    assert answer["result"]["analyzer"] == "model-graph"
    assert answer["graphs"][0]["timed_reason"] == "a graph from a file cannot be run"


def test_a_trace_folder_that_reports_can_be_made_of(here: Here, graph: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    run = here("graph", graph, "-o", folder)
    assert run.stdout.splitlines()[-1] == f"next: spikeprof report {folder} -o report.html"
    assert store.read_trace(folder).manifest.collectors["model_graph"].state == "ok"
    again = here("graph", graph, "-o", folder)
    assert again.returncode == 4
    assert "exists already" in refusal(again)
    assert "Model graph: 1 operator" in here("analyze", folder).stdout
    page = tmp_path / "report.html"
    assert here("report", folder, "-o", page).returncode == 0
    assert "Tensors held at the peak" in page.read_text("utf-8")


def test_a_cycle_fails_the_policy(here: Here, tmp_path: Path) -> None:
    path, folder = tmp_path / "cycle.json", tmp_path / "trace"
    path.write_text(json.dumps({"nodes": [{"name": "a", "inputs": ["b"]}, {"name": "b", "inputs": ["a"]}]}))
    run = here("graph", path, "-o", folder)
    assert run.returncode == 0
    assert "cycle a → b → a" in run.stdout
    assert here("analyze", folder, "--fail-on", "critical").returncode == 1


def test_what_the_factory_says_is_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    run = spikeprof("graph", f"{MODELS}:raises", "--json", "-o", tmp_path / "trace")
    assert run.returncode == 3
    assert refusal(run).startswith(f"no graph: {MODELS}:raises failed: ValueError: no weights here (graph_models.py:")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nothing"], 2, "'nothing' names no factory: write package.module:function or path/file.py:function"),
        (["absent.json"], 3, "absent.json cannot be read: No such file or directory"),
        (["m:f", "--runs", "0"], 2, "--runs 0: must be from 1 to 10000; --no-time runs nothing"),
        (["m:f", "--python", "absent-python"], 127, "absent-python: command not found"),
        (["no_such_module:f"], 3, "no graph: no_such_module cannot be imported: ModuleNotFoundError: "),
    ],
)
def test_refusals(
    here: Here, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run = here("graph", *arguments)
    assert run.returncode == code
    assert refusal(run).startswith(said)


def test_a_module_of_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make():\n    raise KeyError('found')\n")
    run = spikeprof("graph", "mine:make", cwd=tmp_path)
    assert "mine:make failed: KeyError: 'found' (mine.py:2, in make)" in refusal(run)


def test_a_run_says_why_there_is_no_graph_and_keeps_its_exit_code(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    program = [sys.executable, "-c", "print('mine'); raise SystemExit(4)"]
    run = spikeprof("run", "--graph", f"{MODELS}:exits", "-o", folder, "--", *program)
    assert (run.returncode, run.stdout) == (4, "mine\n")
    note = store.read_trace(folder).manifest.collectors["model_graph"]
    assert note.state == "refused"
    assert note.reason == f"{MODELS}:exits failed: it called sys.exit(3)"
    assert f"the model's graph was not read: {note.reason}" in run.stderr


def test_a_run_refuses_what_is_no_factory_before_it_starts(tmp_path: Path) -> None:
    run = spikeprof("run", "--graph", "nothing", "--", sys.executable, "-c", "print('ran')", cwd=tmp_path)
    assert run.returncode == 2
    assert "names no factory" in refusal(run)


def test_the_python_is_the_commands_own_where_it_says_which() -> None:
    assert _interpreter([sys.executable, "-X", "dev", "infer.py"]) == [sys.executable, "-X", "dev"]
    assert _interpreter(["ls"]) == [sys.executable]
    assert _interpreter(["/nonexistent"]) == [sys.executable]
