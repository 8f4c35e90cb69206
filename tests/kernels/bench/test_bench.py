from __future__ import annotations

import json
import time

import pytest

torch = pytest.importorskip("torch")

from spikeprof.kernels.bench import table  # noqa: E402
from spikeprof.kernels.bench.__main__ import main  # noqa: E402
from spikeprof.kernels.bench.case import BYTES, FLOPS, Case, NotMeasured, drawn, relative_error  # noqa: E402
from spikeprof.kernels.bench.cases import cases  # noqa: E402
from spikeprof.kernels.bench.measured import Measured, Timed, run_case, try_case  # noqa: E402
from spikeprof.kernels.bench.peaks import Peaks  # noqa: E402
from spikeprof.kernels.bench.timing import COLD, WARM, Times, l2_states, measure  # noqa: E402
from spikeprof.kernels.paths import Ran  # noqa: E402

CPU = torch.device("cpu")
PEAKS = Peaks("a GPU", 50 << 20, 4e12, "torch", 7e14, "kernel", "float16", 2500.0)


def doubling(**changes: object) -> Case:
    """A case whose kernel doubles 1,000 numbers of 4 bytes."""
    values: dict[str, object] = {
        "kernel": "double",
        "shape": "1000 fp32",
        "make": lambda device: drawn(1000, device=device),
        "call": lambda x: Ran(2 * x, "torch"),
        "bytes_moved": 8000,
        "check": lambda x, out: (out, 2 * x.double()),
        "error_bound": 1e-5,
        "twins": {"slow": lambda x: time.sleep(0.002)},
    }
    return Case(**(values | changes))


def measured(case: Case, kernel_ns: float, twin_ns: float, error: float | None = 1e-7) -> Measured:
    """As if each of 10 runs had taken that long."""
    work = case.flops if case.bound_by == FLOPS else case.bytes_moved
    rate = 1e9 * work / kernel_ns
    peak = PEAKS.product_flops_per_s if case.bound_by == FLOPS else PEAKS.copy_bytes_per_s
    timed = [
        Timed(l2, Times((factor * kernel_ns,) * 10), {"slow": Times((factor * twin_ns,) * 10)}, rate, rate / peak)
        for l2, factor in ((COLD, 1.0), (WARM, 0.5))
    ]
    return Measured(case, "triton", error, tuple(timed))


def test_median_and_p90_of_times():
    times = Times(tuple(float(ns) for ns in (50, 10, 40, 30, 20, 60, 100, 90, 80, 70)))
    assert (times.median_ns, times.p90_ns) == (55.0, 90.0)
    assert (Times((7.0,)).median_ns, Times((7.0,)).p90_ns) == (7.0, 7.0)


def test_twins_take_turns():
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = measure(calls, CPU, WARM, runs=3, warm_ups=1)
    assert order == ["a", "b", *["a", "b"] * 3]
    assert {name: len(each.runs_ns) for name, each in times.items()} == {"a": 3, "b": 3}


def test_what_sleeps_longer_takes_longer():
    times = measure({"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.004)}, CPU, runs=5)
    assert 1e6 <= times["short"].median_ns < times["long"].median_ns
    assert times["long"].median_ns >= 4e6


def test_caches_of_a_cpu_are_warm_only():
    assert l2_states(CPU) == (WARM,)
    with pytest.raises(ValueError, match="l2 is 'cold' on cpu: caches of a CPU are not emptied here"):
        measure({}, CPU, COLD)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_reading_again_is_faster_with_a_warm_l2():
    device = torch.device("cuda", 0)
    x = drawn(1 << 21, device=device)
    medians = {l2: measure({"sum": x.sum}, device, l2)["sum"].median_ns for l2 in (COLD, WARM)}
    assert medians[WARM] < medians[COLD]


def test_relative_error_by_hand():
    wanted = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), wanted) == 0.1
    assert relative_error(wanted, wanted) == 0.0
    assert relative_error(torch.tensor([0.0, 0.5]), torch.zeros(2)) == 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_never_passes(bad):
    x = torch.tensor([1.0, bad])
    assert relative_error(x, torch.ones(2)) == relative_error(torch.ones(2), x) == relative_error(x, x) == float("inf")
    result = run_case(doubling(call=lambda x: Ran(x * bad, "torch")), CPU, PEAKS, 2)
    assert not result.correct


def test_a_case_is_checked_and_timed():
    result = run_case(doubling(), CPU, PEAKS, 5)
    assert (result.path, result.correct) == ("torch", True)
    (timed,) = result.timed
    assert timed.l2 == WARM
    assert timed.rate_per_s == pytest.approx(8000 / (timed.kernel.median_ns / 1e9))
    assert timed.peak_share == pytest.approx(timed.rate_per_s / 4e12)
    assert timed.times_faster("slow") > 1


def test_a_wrong_result_is_wrong_and_a_failure_is_told():
    wrong = run_case(doubling(call=lambda x: Ran(2.1 * x, "torch")), CPU, PEAKS, 2)
    assert wrong.error == pytest.approx(0.05, rel=1e-3)
    assert not wrong.correct
    failed = try_case(doubling(make=lambda device: {}["x"]), CPU, PEAKS, 2)
    assert failed == NotMeasured("double", "1000 fp32: KeyError: 'x'", failed=True)
    assert list(table.footnotes([wrong, failed])) == [
        "×twin: how many times faster than",
        "  slow: double",
        "double, 1000 fp32: WRONG: error 5.0e-02, 1e-05 is allowed",
        "double: FAILED: 1000 fp32: KeyError: 'x'",
    ]


def text_of(renderable: object) -> list[str]:
    from rich.console import Console

    console = Console(width=80, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(renderable)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_table_by_hand():
    copy = doubling(kernel="stream_copy", shape="262144 Ki fp32", bytes_moved=2 << 30)
    product = doubling(kernel="matmul", shape="8192³ fp16", bytes_moved=1, flops=2 * 8192**3, bound_by=FLOPS)
    nothing = doubling(kernel="launch_empty", shape="20 launches", bytes_moved=0, twins={}, check=None)
    rows = [
        measured(copy, 596_523.0, 600_000.0, 0.0),
        measured(product, 1_746_000.0, 1_700_000.0, 3.1e-4),
        measured(nothing, 50_000.0, 1.0, None),
        NotMeasured("peer_copy", "it needs 2 GPUs, there is 1"),
    ]
    lines = text_of(table.results_table(rows))
    assert max(map(len, lines)) <= 80
    assert lines == [
        "kernel, shape             L2     median      p90        rate peak error    ×twin",
        "stream_copy               cold   597 µs   597 µs   3600 GB/s  90% exact     1.01",
        "262144 Ki fp32            warm   298 µs   298 µs   3600 GB/s  90% triton    1.01",
        "matmul                    cold  1.75 ms  1.75 ms 630 TFLOP/s  90% 3.1e-04   0.97",
        "8192³ fp16                warm   873 µs   873 µs 630 TFLOP/s  90% triton    0.97",
        "launch_empty              cold  50.0 µs  50.0 µs           –    – –            –",
        "20 launches               warm  25.0 µs  25.0 µs           –    – triton       –",
    ]


@pytest.mark.parametrize(
    ("per_s", "flops", "text"),
    [(0, False, "–"), (950, False, "950 B/s"), (4.2e12, False, "4200 GB/s"), (9.4e9, False, "9.4 GB/s"),
     (7.1e14, True, "710 TFLOP/s"), (2.5e15, True, "2500 TFLOP/s"), (3.2e10, True, "32 GFLOP/s")],
)  # fmt: skip
def test_rates_in_the_unit_that_suits(per_s, flops, text):
    assert table.rate(per_s, flops=flops) == text


def test_every_case_has_a_reference_or_no_result_to_check():
    for case in cases(CPU, True):
        if isinstance(case, Case):
            assert case.check is not None or case.kernel == "launch_empty"
            assert case.bound_by in (BYTES, FLOPS)
            assert case.flops > 0 or case.bound_by == BYTES
            assert len(case.shape) <= 25


def test_cases_for_a_gpu_fit_the_table():
    shapes = [case.shape for case in cases(torch.device("cuda", 0), False) if isinstance(case, Case)]
    assert shapes
    assert max(map(len, shapes)) <= 50


def test_names_choose_cases():
    assert {case.kernel for case in cases(CPU, True, ["trans", "decode"])} == {
        "transpose padded",
        "transpose swizzled",
        "decode",
    }
    with pytest.raises(ValueError, match=r"name is 'conv': it can be stream_copy, matmul"):
        cases(CPU, True, ["conv"])


def test_quick_on_the_cpu_is_right(capsys):
    assert main(["--quick", "--device", "cpu", "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert max(map(len, shown.err.splitlines())) <= 80
    values = json.loads(shown.out)
    assert values["peaks"]["copy_bytes_per_s"] > 0
    by_kernel = {case["kernel"]: case for case in values["cases"]}
    few = torch.cuda.device_count() < 2
    assert by_kernel["peer_copy"]["not_measured"].startswith("it needs 2 GPUs" if few else "the CPU is measured")
    for kernel in ("stream_copy", "matmul", "nhwc_to_nchwc16", "gelu_dropout", "prefill", "paged decode int8"):
        case = by_kernel[kernel]
        assert case["correct"]
        assert case["path"] == "torch"
        assert case["timed"][0]["p90_ns"] >= case["timed"][0]["median_ns"] > 0


def test_the_command_writes_a_file_and_tells_wrong_arguments(tmp_path, capsys):
    target = tmp_path / "bench.json"
    assert main(["stream", "--quick", "--device", "cpu", "--runs", "3", "--json", str(target)]) == 0
    assert [case["kernel"] for case in json.loads(target.read_text())["cases"]] == ["stream_copy"]
    for wrong, why in ((tmp_path, "Is a directory"), (tmp_path / "gone" / "x", "No such file or directory")):
        assert main(["stream", "--quick", "--device", "cpu", "--json", str(wrong)]) == 2
        assert capsys.readouterr().err == f"bench: --json is '{wrong}': it cannot be written: {why}\n"
    with pytest.raises(SystemExit):
        main(["stream", "--runs", "many"])
    assert "argument --runs: 'many': it must be a whole number, 1 or more" in capsys.readouterr().err
    assert main(["nothing", "--device", "cpu"]) == 2
    assert "bench: name is 'nothing': it can be stream_copy" in capsys.readouterr().err
    assert main(["--ratios", "nothing", "--device", "cpu"]) == 2
    assert "with --ratios it can be gelu-dropout, layout" in capsys.readouterr().err
