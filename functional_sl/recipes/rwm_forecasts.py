"""Free-running forecasts of held-out episodes: how far they go wrong, whether they know it, and against which floors.

A forecast ends with its episode. The error up to a horizon is the mean over its steps of the mean over the forecasts
that have the step, so that no step counts for more because more forecasts have it. Errors are in standard deviations of
the training set; two floors need no model: the last state, held, and the mean of the training set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl.models import normalizer, rwm
from functional_sl.models.rwm import Model, Scales

MODEL, HOLD, MEAN = "", "hold_", "mean_"  # whose errors; prefixes of figures
_GREATEST = 1e3  # an error of a forecast, in standard deviations


class Run(NamedTuple):
    """E forecasts over H steps on the host, in normalised units."""

    mean: Tensor  # [E, H, S], of the members
    std: Tensor  # [E, H, S], of the ensemble: within and between members
    fall: Tensor  # [E, H], probability
    last: Tensor  # [E, 1, S], the last state that was seen
    true: Tensor  # [E, H, S]


class Errors(NamedTuple):
    """Errors of E forecasts over H steps."""

    squared: Tensor  # [E, H], mean over the state's channels
    relative: Tensor  # [E, H], sum of |error| over sum of |state|


class Judged(NamedTuple):
    """What counts of E forecasts over H steps."""

    errors: Mapping[str, Errors]  # by MODEL, HOLD, MEAN
    surprise: Tensor  # [E, H], mean over channels of (error / std)^2
    fall: Tensor  # [E, H], probability
    fell: Tensor  # [E, H] bool
    valid: Tensor  # [E, H] bool: the step is in the episode
    episode: Tensor  # [E] int64, from 0


def run(params: Model, scales: Scales, history: int, block: int, state: Tensor, action: Tensor) -> Run:
    """Forecasts from the first `history` of the states [E, M + H, S] and feeds the means back.

    Args:
      params: of the model; its device is where it runs.
      scales: statistics of the training set.
      history: M.
      block: of `roll_out`.
      state: in the units of the data.
      action: [E, M + H - 1, A], likewise.
    """
    like = params.heads.keep
    state, action = (normalizer.normalize(n, x.to(like)) for n, x in ((scales.state, state), (scales.action, action)))
    with torch.no_grad():
        found = rwm.roll_out(params, state[:, :history], action, block)
        variance = torch.exp(2 * found.log_std).mean(0) + found.mean.var(0, correction=0)
        parts = (found.mean.mean(0), variance.sqrt(), torch.sigmoid(found.termination).mean(0))
    return Run(*(x.cpu() for x in (*parts, state[:, history - 1 : history], state[:, history:])))


def errors(predicted: Tensor, true: Tensor) -> Errors:
    """Returns the errors of normalised states [E, H, S]; one is cut at 1000, also where it is no longer finite."""
    gap = _gap(predicted, true)
    return Errors(gap.square().mean(-1), gap.sum(-1) / true.abs().sum(-1))


def judge(
    params: Model, scales: Scales, history: int, block: int, windows: Iterable[tuple[Tensor, ...]], episode: Tensor
) -> Judged:
    """Forecasts part by part and keeps what counts.

    Args:
      params: of the model.
      scales: statistics of the training set.
      history: M.
      block: of `roll_out`.
      windows: parts of (state, action, contact, terminated, valid).
      episode: [E] int64, the number of every window's episode.
    """
    parts = []
    for state, action, _, terminated, valid in windows:
        found = run(params, scales, history, block, state, action)
        true = found.true
        predicted = {MODEL: found.mean, HOLD: found.last.expand_as(true), MEAN: torch.zeros_like(true)}
        surprise = (_gap(found.mean, true) / found.std).square().mean(-1)
        own = {name: errors(x, true) for name, x in predicted.items()}
        parts.append((own, surprise, found.fall, terminated.cpu(), valid.cpu()))
    own, *rest = zip(*parts, strict=True)
    joined = {name: Errors(*(torch.cat(x) for x in zip(*(e[name] for e in own), strict=True))) for name in own[0]}
    return Judged(joined, *(torch.cat(x) for x in rest), episode.cpu())


def by_step(value: Tensor, valid: Tensor) -> Tensor:
    """Returns the mean of [E, H] over the valid entries of every step, [H]; 0 where there are none."""
    return torch.where(valid, value, 0.0).sum(0, dtype=torch.float64) / valid.sum(0).clamp(min=1)


def up_to(value: Tensor, valid: Tensor) -> Tensor:
    """Returns the mean of [E, H] over the valid entries of every step, averaged over the steps up to each, [H]."""
    count = valid.sum(0)
    return _averaged(torch.where(valid, value, 0.0).sum(0, dtype=torch.float64), count)


def figures(found: Judged, horizons: tuple[int, ...]) -> dict[str, float]:
    """Returns the figures for every horizon h, and those of all forecasts together.

    `nrmse_h`, the root of the mean squared error, and `l1_h`, the mean relative error, up to h, with prefixes `hold_`
    and `mean_` for the floors (`mean_l1_h` is 1); `median_nrmse_h`, the median over the forecasts whose episodes last
    up to h; `surprise_h`, the mean of (error / std)^2 at step h, 1 for a spread that fits. `fall_precision` and
    `fall_recall` take a fall for foretold if the probabilities of all steps up to the episode's end make it likelier
    than none, 1 - prod(1 - p) > 1/2; each is 0 where there is none to judge by. `falls` and `forecasts` are numbers.
    """
    made: dict[str, float] = {}
    valid = found.valid
    for name, own in found.errors.items():
        squared, relative = up_to(own.squared, valid).sqrt(), up_to(own.relative, valid)
        each = _each(own.squared, valid)
        for h in horizons:
            made[f"{name}nrmse_{h}"] = float(squared[h - 1])
            made[f"{name}l1_{h}"] = float(relative[h - 1])
            made[f"{name}median_nrmse_{h}"] = float(each[valid[:, h - 1], h - 1].quantile(0.5).sqrt())
    for h in horizons:
        made[f"surprise_{h}"] = float(found.surprise[valid[:, h - 1], h - 1].mean())
    told = torch.where(valid, 1 - found.fall, 1.0).prod(1) < 0.5
    true = (found.fell & valid).any(1)
    right = int((told & true).sum())
    made["fall_precision"] = right / max(1, int(told.sum()))
    made["fall_recall"] = right / max(1, int(true.sum()))
    return made | {"falls": float(true.sum()), "forecasts": float(len(valid))}


def intervals(
    one: Tensor, other: Tensor, valid: Tensor, episode: Tensor, weight: Tensor, share: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Returns bounds [H] of a paired bootstrap interval of the nRMSE of `other` minus that of `one`, up to each step.

    Whole episodes are drawn again, and both sides get the same: their forecasts overlap and are not independent.

    Args:
      one: [E, H] squared errors.
      other: of the same forecasts by another model.
      valid: [E, H] bool.
      episode: [E] int64 below P.
      weight: [P, R] int64, how often each of R resamples has an episode.
      share: of the resamples between the bounds.
    """
    times = weight.T.to(torch.float64)

    def resampled(x: Tensor) -> Tensor:
        sums = torch.zeros(len(weight), x.shape[1], dtype=torch.float64)
        return times @ sums.index_add(0, episode, x.to(torch.float64))

    count = resampled(valid)
    a, b = (_averaged(resampled(torch.where(valid, x, 0.0)), count).sqrt() for x in (one, other))
    low, high = torch.quantile(b - a, torch.tensor(((1 - share) / 2, (1 + share) / 2), dtype=torch.float64), 0)
    return low, high


def _gap(predicted: Tensor, true: Tensor) -> Tensor:
    return torch.nan_to_num((predicted - true).abs(), nan=_GREATEST).clamp(max=_GREATEST)


def _averaged(total: Tensor, count: Tensor) -> Tensor:
    """Returns the means over the steps up to each of total / count [..., H]; a step that nothing has is none."""
    has = count > 0
    return torch.where(has, total / count.clamp(min=1), 0.0).cumsum(-1) / has.cumsum(-1).clamp(min=1)


def _each(squared: Tensor, valid: Tensor) -> Tensor:
    """Returns every forecast's mean over its valid steps up to each, [E, H]."""
    return torch.where(valid, squared, 0.0).cumsum(1) / valid.cumsum(1).clamp(min=1)
