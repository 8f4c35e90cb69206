from __future__ import annotations

import math

import pytest
import torch

from spikeprof.kernels.engine.sampling import Sampling, draw, probabilities, sample, uniform


def test_chances_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert probabilities(logits, [Sampling()]).tolist() == [[1.0, 0.0, 0.0]]
    assert probabilities(logits, [Sampling(1.0)])[0].tolist() == pytest.approx([0.5, 0.3, 0.2])
    # Half the temperature squares the chances: 25, 9, 4 of 38.
    assert probabilities(logits, [Sampling(0.5)])[0].tolist() == pytest.approx([25 / 38, 9 / 38, 4 / 38])
    assert probabilities(logits, [Sampling(1.0, 0.6)])[0].tolist() == pytest.approx([5 / 8, 3 / 8, 0])
    assert probabilities(logits, [Sampling(1.0, 0.5)])[0].tolist() == pytest.approx([1, 0, 0])
    assert probabilities(logits, [Sampling(1.0, 1e-9)])[0].tolist() == pytest.approx([1, 0, 0])


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-44, 1e-60])
def test_low_temperatures_are_greedy_in_the_end(temperature: float) -> None:
    logits = torch.tensor([[100.0, -3e38, 300.0, 299.0]])
    assert probabilities(logits, [Sampling(temperature)]).tolist() == [[0, 0, 1, 0]]


def test_equal_chances_at_the_edge_go_to_the_lower_ids() -> None:
    assert probabilities(torch.zeros(1, 4), [Sampling(1.0, 0.5)])[0].tolist() == pytest.approx([0.5, 0.5, 0, 0])


def test_drawing_inverts_the_distribution() -> None:
    chances = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for u, want in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.9999, 3), (1 - 2**-53, 3)):
        assert draw(chances, [u]).tolist() == [want]
    with pytest.raises(ValueError, match="uniforms has 2 numbers for 1 rows"):
        draw(chances, [0.1, 0.2])


def test_uniform_numbers_are_spread_evenly() -> None:
    drawn = torch.tensor([uniform(7, position) for position in range(20000)])
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    counts = torch.histc(drawn, 10, 0, 1)
    assert ((counts - 2000).abs() < 5 * (2000 * 0.9) ** 0.5).all()
    assert len({uniform(seed, 0, stream) for seed in range(-2, 50) for stream in range(4)}) == 52 * 4


def test_frequencies_are_the_chances() -> None:
    chances = torch.tensor([0.6, 0.3, 0.08, 0.02])
    count = 20000
    drawn = sample(chances.log().expand(count, 4), [Sampling(1.0, seed=n) for n in range(count)], [0] * count)
    found = torch.bincount(drawn, minlength=4) / count
    assert ((found - chances).abs() < 5 * (chances * (1 - chances) / count).sqrt()).all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    samplings = [Sampling(), Sampling(0.8, seed=3), Sampling(1.3, 0.7, seed=4), Sampling(1.0, 0.2, seed=5)]
    together = sample(logits, samplings, [5, 6, 7, 8]).tolist()
    alone = [int(sample(logits[[n]], [samplings[n]], [5 + n])) for n in range(4)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((-0.1, 1.0), "temperature is -0.1: it must be 0 or more"),
        ((float("nan"), 1.0), "temperature is nan"),
        ((1.0, 0.0), "top_p is 0.0: it must be above 0, and at most 1"),
        ((1.0, 1.1), "top_p is 1.1"),
    ],
)
def test_options_out_of_range(options: tuple[float, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Sampling(*options)


def test_a_seed_must_be_an_integer() -> None:
    with pytest.raises(ValueError, match=r"seed is 0.5: it must be an integer"):
        Sampling(1.0, 1.0, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, 0.5)], ids=str)
def test_no_token_is_told_from_logits_that_are_not_finite(wrong: float, sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, 1.0, wrong], [9.0, -100.0, -math.inf]])
    assert sample(logits, [sampling] * 2, [0, 0]).tolist() == [-1, 0]
    assert sample(logits.fill_(-math.inf), [sampling] * 2, [0, 0]).tolist() == [-1, -1]


def test_a_draw_is_never_out_of_range() -> None:
    assert draw(torch.tensor([[math.nan] * 3, [0.0, 1.0, 0.0]]), [0.5, 0.5]).tolist() == [2, 1]


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"logits has shape \[2, 3\], \[1, any\] is wanted"):
        sample(torch.zeros(2, 3), [Sampling()], [0])
    with pytest.raises(ValueError, match="logits has no rows"):
        sample(torch.zeros(0, 3), [], [])
