from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from spikeprof.kernels import fused  # noqa: E402
from spikeprof.kernels.bench import ratios_serving  # noqa: E402
from spikeprof.kernels.bench.__main__ import main  # noqa: E402
from spikeprof.kernels.bench.peaks import Peaks  # noqa: E402
from spikeprof.kernels.bench.ratio import Ours, Ratio, Setting, percent  # noqa: E402
from spikeprof.kernels.bench.ratios import RATIOS, measured, ratios, ratios_json  # noqa: E402

SETTING = Setting(torch.device("cpu"), True, 3, Peaks("CPU", 0, 1e10, "torch", 1e11, "torch", "float32", 500.0))


@pytest.fixture(scope="module")
def rows(request) -> dict[str, Ours]:
    """Every row but the pipe, which starts a process and has a test of its own."""
    chosen = [ratio for name, ratio in RATIOS.items() if name != "request-pipe"]
    found = {ratio.name: (ours, failed) for ratio, ours, failed in measured(chosen, SETTING)}
    assert [name for name, (_, failed) in found.items() if failed] == []
    return {name: ours for name, (ours, _) in found.items()}


def test_there_is_a_row_for_every_published_claim():
    assert list(RATIOS) == [
        "gelu-dropout", "layout", "paged-cache", "kv-precision", "attention-memory", "decoder-fusion", "request-pipe",
        "padding", "bank-conflicts", "dynamic-batching",
    ]  # fmt: skip


def test_each_row_says_what_was_measured_or_why_not(rows):
    for name, ours in rows.items():
        assert bool(ours.text) != bool(ours.reason), name
        assert bool(ours.how) == bool(ours.text), name
    assert rows["attention-memory"].reason == "torch counts the peak of memory on GPUs only"


def test_paging_fills_the_memory(rows):
    figures = rows["paged-cache"].figures
    assert figures["long_contiguous_used_share"] == pytest.approx(0.42, abs=0.05)
    assert figures["long_paged_used_share"] > 0.91
    assert figures["short_paged_used_share"] > 0.91
    assert figures["long_contiguous_sequences"] == figures["short_contiguous_sequences"] == 8
    # 8 rows in use to 42 % hold what fits 8 / 0.42 = 19 times.
    assert figures["long_paged_sequences"] == pytest.approx(19, abs=2)
    assert figures["short_paged_sequences"] >= 64


def test_bytes_that_quantising_saves_by_hand(rows):
    figures = rows["kv-precision"].figures
    # A head of 128 in fp16: 512 bytes for key and value. 8 bits: 128 + 4 for a side; 4 bits: 64 + 4 * 4.
    assert figures["int8-values_saved_share"] == 1 - (256 + 132) / 512
    assert figures["int8_saved_share"] == 1 - (132 + 132) / 512
    assert figures["int4_saved_share"] == 1 - (80 + 80) / 512
    assert figures["int8_key_attention_error"] <= 0.01
    assert abs(figures["int8_perplexity_change_share"]) <= 0.008


def test_ways_of_the_tiles(rows):
    figures = rows["bank-conflicts"].figures
    assert (figures["conflicting_ways"], figures["padded_ways"], figures["swizzled_ways"]) == (32, 1, 1)


def test_each_set_of_the_decoder_runs_operators_of_its_own(monkeypatch):
    ran = []
    for name in ("rms_norm_residual", "rms_norm_residual_unfused", "silu_mul", "silu_mul_unfused"):
        own = getattr(fused, name)

        def counted(*args, own=own, name=name, **options):
            ran.append(name)
            return own(*args, **options)

        monkeypatch.setattr(fused, name, counted)
    list(measured([RATIOS["decoder-fusion"]], SETTING))
    # Five norms and two activations in each pass; two sets of separate ones, and the engine's own pass before decode.
    assert ran.count("silu_mul_unfused") == 2 * (ran.count("silu_mul") - 2) > 0
    assert 2 * ran.count("rms_norm_residual_unfused") == 5 * ran.count("silu_mul_unfused")


def test_padding_by_hand(rows):
    # Two batches of widths 4 and 4: 8 of 16 tokens are padding; by the longest of each, 4 and 2: 4 of 12.
    batches = [[4, 2], [1, 1]]
    assert ratios_serving._waste(batches, [4, 4]) == 0.5
    assert ratios_serving._waste(batches, [4, 1]) == pytest.approx(0.2)
    figures = rows["padding"].figures
    assert figures["static_wasted_share"] == pytest.approx(0.62, abs=0.02)
    assert figures["sorted_wasted_share"] < figures["per_batch_wasted_share"] < figures["static_wasted_share"]


def test_throughput_grows_with_concurrency(rows):
    figures = rows["dynamic-batching"].figures
    assert figures["16_tokens_per_s"] > figures["1_tokens_per_s"]
    assert figures["knee_concurrency"] in (1, 4, 16)


def test_a_failing_row_does_not_stop_the_others():
    def fail(_setting: Setting) -> Ours:
        raise ZeroDivisionError("by nothing\nand more")

    broken = Ratio("broken", "an experiment", "a claim", fail)
    found = list(measured([broken, RATIOS["bank-conflicts"]], SETTING))
    assert [failed for _, _, failed in found] == [True, False]
    assert ratios_json(found)[0]["not_measured"] == "ZeroDivisionError: by nothing"


def test_names_choose_rows():
    assert [ratio.name for ratio in ratios(["pa", "kv"])] == ["paged-cache", "kv-precision", "padding"]
    with pytest.raises(ValueError, match="name is 'x': with --ratios it can be gelu-dropout"):
        ratios(["x"])


def test_shares_in_percent():
    assert [percent(share) for share in (0.419, 0.0312, -0.28)] == ["42 %", "3.1 %", "-28 %"]


def test_the_command_and_the_pipe(capsys):
    assert main(["--ratios", "request", "bank", "--quick", "--device", "cpu", "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert max(map(len, shown.err.splitlines())) <= 80
    pipe, banks = json.loads(shown.out)["ratios"]
    assert pipe["name"] == "request-pipe"
    assert pipe["figures"]["times_requests_per_s"] > 1
    assert banks["ours"].startswith("32-way → 1-way")
