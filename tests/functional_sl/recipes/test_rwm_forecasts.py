"""Errors, floors, calibration, falls and the bootstrap of free-running forecasts, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from functional_sl import keys
from functional_sl.models import rwm as model
from functional_sl.models.normalizer import Normalizer
from functional_sl.models.rwm import Architecture, Scales
from functional_sl.recipes import rwm_forecasts, rwm_windows
from functional_sl.recipes.rwm_forecasts import Errors, Judged


def judged(squared: list, valid: list, fall: list, fell: list, surprise: list | None = None) -> Judged:
    errors = Errors(torch.tensor(squared), torch.tensor(squared).sqrt())
    flags = (torch.tensor(fell).bool(), torch.tensor(valid).bool())
    seen = torch.tensor(surprise or squared)
    return Judged({"": errors}, seen, torch.tensor(fall), *flags, torch.arange(len(squared)))


def test_errors_by_hand() -> None:
    """Errors 0.5 and 1 at the first step, 0 and 2 at the second; true states 1 and 2, then 3 and 1."""
    true = torch.tensor([[[1.0, 2.0], [3.0, 1.0]]])
    found = rwm_forecasts.errors(true + torch.tensor([[[0.5, -1.0], [0.0, 2.0]]]), true)
    assert found.squared.tolist() == [[(0.25 + 1) / 2, (0 + 4) / 2]]
    assert found.relative.tolist() == [[1.5 / 3, 2 / 4]]
    lost = rwm_forecasts.errors(torch.full_like(true, math.nan), true)
    assert lost.squared.tolist() == [[1e6, 1e6]]


def test_a_step_counts_once_however_many_forecasts_have_it_and_what_is_not_valid_never() -> None:
    """Squared errors 1, 3 at the first step and 8 at the second, which the second forecast does not have."""
    found = judged([[1.0, 8.0], [3.0, math.nan]], [[1, 1], [1, 0]], [[0.0, 0.0]] * 2, [[0, 0]] * 2)
    figures = rwm_forecasts.figures(found, (1, 2))
    assert figures["nrmse_1"] == pytest.approx(math.sqrt(2))
    assert figures["nrmse_2"] == pytest.approx(math.sqrt((2 + 8) / 2))
    assert figures["l1_2"] == pytest.approx(((1 + math.sqrt(3)) / 2 + math.sqrt(8)) / 2)
    assert figures["median_nrmse_1"] == pytest.approx(math.sqrt(2))
    assert figures["median_nrmse_2"] == pytest.approx(math.sqrt((1 + 8) / 2))  # of the one that lasts
    assert (figures["surprise_1"], figures["surprise_2"]) == (2, 8)
    assert figures["forecasts"] == 2


def test_a_fall_is_foretold_by_the_probabilities_of_all_steps_up_to_the_end() -> None:
    """1 - 0.7^2 = 0.51 foretells one, 0.3 does not; behind the end of an episode nothing counts.

    Foretold: rows 0, 1; true: rows 0, 2, 3.
    """
    fall = [[0.3, 0.3], [0.6, 0.0], [0.3, 0.9], [0.1, 0.2]]
    found = judged([[1.0, 1.0]] * 4, [[1, 1], [1, 1], [1, 0], [1, 1]], fall, [[0, 1], [0, 0], [1, 1], [0, 1]])
    figures = rwm_forecasts.figures(found, (1,))
    assert figures["falls"] == 3
    assert figures["fall_precision"] == pytest.approx(1 / 2)
    assert figures["fall_recall"] == pytest.approx(1 / 3)
    none = rwm_forecasts.figures(judged([[1.0]], [[1]], [[0.0]], [[0]]), (1,))
    assert (none["fall_precision"], none["fall_recall"]) == (0, 0)


def test_floors_and_surprise_of_a_made_up_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members forecast 1 and 3 with a std of 2 where the truth is 4: the ensemble's std is sqrt(4 + 1), and the
    surprise (2 - 4)^2 / 5. The held state is 3, the mean 0."""
    params = model.init(keys.key(0), Architecture(1, 1, 1, 2, 1, 2, 2))
    scales = Scales(*(Normalizer(torch.ones(1), torch.full((1,), 2.0)),) * 2)

    def made_up(params: model.Model, states: torch.Tensor, actions: torch.Tensor) -> model.Forecast:
        mean = torch.tensor([1.0, 3.0]).reshape(2, 1, 1, 1).expand(2, 1, 2, 1)
        return model.Forecast(mean, torch.full_like(mean, math.log(2)), mean, torch.zeros(2, 1, 2))

    monkeypatch.setattr(model, "forecast", made_up)
    state = 2 * torch.tensor([0.0, 3.0, 4.0, 4.0])[None, :, None] + 1
    windows = [(state, torch.zeros(1, 3, 1), None, torch.zeros(1, 2).bool(), torch.ones(1, 2).bool())] * 2
    found = rwm_forecasts.judge(params, scales, 2, 8, windows, torch.tensor([0, 1]))
    torch.testing.assert_close(found.surprise, torch.full((2, 2), 4 / 5))
    torch.testing.assert_close(found.fall, torch.full((2, 2), 0.5))
    figures = rwm_forecasts.figures(found, (2,))
    assert figures["nrmse_2"] == pytest.approx(2)
    assert figures["hold_nrmse_2"] == pytest.approx(1)
    assert figures["mean_nrmse_2"] == pytest.approx(4)
    assert (figures["hold_l1_2"], figures["mean_l1_2"]) == (pytest.approx(1 / 4), pytest.approx(1))


def test_intervals_are_those_of_resampled_episodes() -> None:
    """Against a loop that joins the forecasts of the episodes that a resample has, as often as it has them."""
    one, other = (keys.uniform(keys.key(i), (7, 5)) for i in range(2))
    valid = torch.arange(5) < torch.tensor([5, 2, 5, 1, 5, 4, 3])[:, None]
    episode = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    weight = rwm_windows.bootstrap(keys.key(2), 4, 50)
    found = []
    for r in range(50):
        rows = [i for i in range(7) for _ in range(int(weight[episode[i], r]))]
        steps = []
        for k in range(5):
            own = [i for i in rows if valid[i, k]]
            if own:
                steps.append([sum(float(x[i, k]) for i in own) / len(own) for x in (one, other)])
            both = [sum(s[j] for s in steps) / len(steps) for j in range(2)]
            found.append(math.sqrt(both[1]) - math.sqrt(both[0]))
    found = torch.tensor(found, dtype=torch.float64).reshape(50, 5)
    expected = torch.stack([found.quantile(q, 0) for q in (0.1, 0.9)])
    bounds = rwm_forecasts.intervals(one, other, valid, episode, weight, 0.8)
    torch.testing.assert_close(torch.stack(bounds), expected, rtol=0, atol=1e-9)
    same = rwm_forecasts.intervals(one, one, valid, episode, weight)
    assert not any(bool(x.any()) for x in same)
