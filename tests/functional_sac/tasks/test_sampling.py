"""The adaptive sampling on a line of 100 frames, 50 a second: three bins."""

from __future__ import annotations

import math

import pytest
import torch

from functional_sac.tasks import sampling
from functional_sl import keys

FRAMES, FPS = 100, 50.0


def test_there_is_about_one_bin_a_second() -> None:
    assert sampling.init(FRAMES, FPS).failures.tolist() == [0.0, 0.0, 0.0]
    assert sampling.init(99, FPS).failures.shape == (2,)


def test_failures_are_counts_and_move_the_average_only_when_there_are_any() -> None:
    """Frames 0, 40 and 99 lie in bins 0, 40 * 3 // 100 = 1 and 2."""
    start, frame = sampling.init(FRAMES, FPS), torch.tensor([0, 0, 40, 99])
    once = sampling.update(start, frame, torch.tensor([True, True, False, True]), FRAMES)
    assert once.failures.tolist() == pytest.approx([0.002, 0.0, 0.001])
    again = sampling.update(once, frame, torch.zeros(4, dtype=torch.bool), FRAMES)
    assert again.failures.tolist() == once.failures.tolist()
    third = sampling.update(once, frame, torch.tensor([False, False, True, False]), FRAMES)
    assert third.failures.tolist() == pytest.approx([0.002 * 0.999, 0.001, 0.001 * 0.999])


def test_probabilities_keep_a_uniform_share() -> None:
    """Weights 0.1 / 3 + (0.2, 0, 0) sum to 0.3."""
    found = sampling.probabilities(sampling.Sampling(torch.tensor([0.2, 0.0, 0.0])))
    assert found.tolist() == pytest.approx([0.7 / 0.9, 0.1 / 0.9, 0.1 / 0.9])


@pytest.mark.parametrize(
    ("uniform", "frame"),
    [((0.0, 0.0), 0), ((0.49, 0.5), 16), ((0.51, 0.0), 66), ((0.9999, 0.9999), 98)],
    ids=["first", "middle of bin 0", "start of bin 2", "last"],
)
def test_a_frame_is_drawn_by_two_numbers(uniform: tuple[float, float], frame: int) -> None:
    """floor((bin + u) / 3 * 99), and bin 1 has no probability."""
    probability = torch.tensor([0.5, 0.0, 0.5])
    assert sampling.draw(probability, torch.tensor([uniform]), FRAMES).tolist() == [frame]


def test_draws_follow_the_probabilities() -> None:
    probability = torch.tensor([0.6, 0.1, 0.3])
    frames = sampling.draw(probability, keys.uniform(keys.key(0), (20_000, 2)), FRAMES)
    shares = torch.bincount(frames * 3 // 99, minlength=3) / 20_000
    # Four standard deviations of a share of one half.
    assert shares[:3].tolist() == pytest.approx(probability.tolist(), abs=4 * 0.5 / math.sqrt(20_000))


def test_measures() -> None:
    uniform = sampling.measures(torch.full((3,), 1 / 3))
    assert float(uniform["sampling_entropy"]) == pytest.approx(1.0)
    peaked = sampling.measures(torch.tensor([0.0, 1.0, 0.0]))
    found = {name: float(value) for name, value in peaked.items()}
    expected = {"sampling_entropy": 0.0, "sampling_top1_prob": 1.0, "sampling_top1_bin": 1 / 3}
    assert found == pytest.approx(expected, abs=1e-6)
    assert float(sampling.measures(torch.ones(1))["sampling_entropy"]) == 1.0
