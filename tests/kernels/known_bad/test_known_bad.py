from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from spikeprof.kernels.known_bad import WORKLOADS, fp16_overflow, host_sync, straggler, strided_kv, workload  # noqa: E402
from spikeprof.kernels.known_bad.__main__ import main  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "straggler"])
def test_twins_give_the_same_or_say_why_not(name):
    job = workload(name)
    bad, good = (job.run(good=good, device=DEVICE, small=True) for good in (False, True))
    assert good.isfinite().all()
    assert bad.shape == good.shape
    if job.differs:
        assert not bad.isfinite().all()
    else:
        torch.testing.assert_close(bad, good, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "straggler"])
def test_a_workload_is_the_same_each_time(name):
    job = workload(name)
    first, again = (job.run(device=DEVICE, small=True) for _ in range(2))
    assert torch.equal(first.nan_to_num(), again.nan_to_num())


def test_each_says_its_defect_and_what_shows_it():
    for name, job in WORKLOADS.items():
        assert name == job.name
        assert job.defect.endswith(".")
        assert "\n" not in job.defect
        assert job.shows.endswith(".")


def test_overflow_of_a_quarter_of_the_activations():
    layer = fp16_overflow.make(torch.device(DEVICE), True)
    squares = torch.relu(layer.x @ layer.up) ** 2
    assert squares.isinf().float().mean() == 0.25
    assert not fp16_overflow.bad(layer).isfinite().any()
    good, wanted = fp16_overflow.good(layer).double(), fp16_overflow.reference(layer)
    assert wanted.isfinite().all()
    assert (good - wanted).norm() / wanted.norm() <= 2e-3


def test_tokens_are_not_all_the_same():
    assert len(set(host_sync.bad(host_sync.make(torch.device(DEVICE), True)).tolist())) > 3


def test_the_bad_cache_has_elements_of_a_head_apart():
    cache = strided_kv.make(torch.device(DEVICE), True)
    assert [x.stride(2) for x in (*cache.strided, *cache.contiguous)] == [4, 4, 1, 1]
    assert torch.equal(cache.strided[0], cache.contiguous[0])


def test_shares_of_rows():
    assert straggler.shares(256, 2, 0.75) == [64, 192]
    assert straggler.shares(100, 4, 0.75) == [9, 8, 8, 75]
    assert straggler.shares(10, 4, 0.25) == [3, 3, 2, 2]


def test_straggler_ranks_add_up_to_the_same(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = straggler.make(torch.device("cpu"), True)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn((64, 64), generator=generator) / 8
    rows = torch.randn((256, 64), generator=generator)
    wanted = 3 * torch.relu(rows @ weights).sum(0)
    for twin in (straggler.bad, straggler.good):
        torch.testing.assert_close(twin(job), wanted, rtol=1e-4, atol=1e-3)


def test_the_command_lists_and_runs(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in WORKLOADS)
    assert max(map(len, listed.splitlines())) <= 80
    assert main(["tiny_kernels", "fp16_overflow", "--small", "--times", "2", "--device", "cpu"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("tiny_kernels bad: 2 x on cpu, ")
    assert first.endswith("16384 of 16384 results finite")
    assert second.endswith(", 0 of 256 results finite")
    assert main(["fp16_overflow", "--good", "--small", "--device", "cpu"]) == 0
    assert "fp16_overflow good: 5 x on cpu" in capsys.readouterr().out


def test_a_wrong_name_is_told_before_anything_runs(capsys):
    assert main(["tiny_kernels", "tiny", "--device", "cpu"]) == 2
    told = capsys.readouterr()
    assert "known_bad: name is 'tiny': it can be tiny_kernels, host_sync" in told.err
    assert told.out == ""


@pytest.mark.parametrize(("device", "allowed"), [("tpu", "it can be auto, cpu, cuda or cuda:N"), ("cuda:99", "there ")])
def test_a_wrong_device_is_told(capsys, device, allowed):
    assert main(["tiny_kernels", "--device", device]) == 2
    assert f"device is '{device}': {allowed}" in capsys.readouterr().err
