from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli.command import refusal, spikeprof
from collectors import fake_cuda, fake_links

from spikeprof.cli.app import run_command_line

NO_GPU = not Path("/dev/nvidiactl").exists()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> fake_links.FakeLinks:
    fake = fake_links.h200_pair()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


@pytest.mark.skipif(not NO_GPU, reason="this machine has an NVIDIA driver")
@pytest.mark.parametrize("options", [(), ("--measure", "--json")])
def test_without_a_gpu_one_sentence_says_why_and_what_still_works(options: tuple[str, ...]) -> None:
    run = spikeprof("topology", *options)
    assert run.returncode == 3
    assert refusal(run).startswith("the links of this machine cannot be read: NVML does not start")
    assert "`spikeprof analyze TRACE`" in refusal(run)


def test_the_answer_for_people(
    two_gpus: fake_links.FakeLinks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command_line(["topology"]) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    assert shown.startswith("2 × NVIDIA H200\n")
    assert "GPU 0  –         NV18 450\n" in shown
    assert "tensor parallelism in 3 levels" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_answer_for_programs_with_measured_rates(
    two_gpus: fake_links.FakeLinks,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fake_cuda.built(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert run_command_line(["topology", "--measure", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [gpu["uuid"] for gpu in answer["gpus"]] == list(fake_cuda.UUIDS[:2])
    assert answer["collector"]["state"] == "ok"
    measured = {(row["src_device"], row["dst_device"]): row["measured_bytes_per_s"] for row in answer["links"]}
    expected = {(0, 1): 400e9, (1, 0): 390e9, (-1, 0): 50e9, (0, -1): 40e9, (-1, 1): 51e9, (1, -1): 41e9}
    assert measured == pytest.approx(expected, rel=1e-4)
    assert answer["result"]["analyzer"] == "topology"
    assert answer["result"]["tables"]["hierarchy"]["levels_count"] == [3]
