"""Reward scaling by the spread of running discounted returns (FlashSAC, arXiv 2604.04539)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl.parallel.collectives import Collectives, single

EPS = 1e-8
OLD_COUNT_EPS = 1e-4


class RewardScaleState(NamedTuple):
    """Running moments of the discounted return; all but `returns` are the same on every rank.

    Attributes:
      returns: [N] float32, every environment's running discounted return.
      max_abs: () float32, the largest |return| seen.
      mean: () float32.
      var: () float32.
      count: () float64, returns seen (with the prior's weight); float32 would stop counting at 2^24.
    """

    returns: Tensor
    max_abs: Tensor
    mean: Tensor
    var: Tensor
    count: Tensor


def init(num_envs: int, *, prior_count: float = 0.0, device: torch.device | str | None = None) -> RewardScaleState:
    """Returns mean 0 and variance 1 with the weight `prior_count` (0 official, 1e-4 UniLab)."""
    return RewardScaleState(
        returns=torch.zeros(num_envs, device=device),
        max_abs=torch.zeros((), device=device),
        mean=torch.zeros((), device=device),
        var=torch.ones((), device=device),
        count=torch.full((), prior_count, dtype=torch.float64, device=device),
    )


def update(
    state: RewardScaleState,
    reward: Tensor,
    done: Tensor,
    gamma: float,
    *,
    old_count_eps: float = OLD_COUNT_EPS,
    collectives: Collectives | None = None,
    valid: Tensor | None = None,
) -> RewardScaleState:
    """Takes in one vector step of all ranks, as one process on their joined environments would.

    The carried return is dropped where the step ends an episode, before its reward is added, as the official
    code does.

    Args:
      state: before the step.
      reward: [N] float32, unscaled.
      done: [N] bool, terminated or truncated.
      gamma: discount per step.
      old_count_eps: added to the old count where it weights the old variance (1e-4 official, 0 UniLab).
      collectives: over the ranks, one by default; the step takes one gathering of four numbers.
      valid: [N] bool, all by default; a step that is not takes no part and starts its environment's return anew.

    Returns:
      The state after it.
    """
    returns = torch.where(done, 0.0, gamma * state.returns) + reward
    # One reward that is not finite would spoil the moments for good; it starts its environment's return anew.
    returns = torch.nan_to_num(returns, nan=0.0, posinf=0.0, neginf=0.0)
    if valid is not None:
        returns = torch.where(valid, returns, 0.0)
    rows, mean, var, largest = _pool((collectives or single()).gather(_moments(returns, valid)))
    delta, total = mean - state.mean, state.count + rows
    spread = state.var * (state.count + old_count_eps) + var * rows + delta * delta * (state.count * rows / total)
    some = rows > 0
    return RewardScaleState(
        returns=returns,
        max_abs=torch.maximum(state.max_abs, largest.to(state.max_abs.dtype)),
        mean=torch.where(some, state.mean + delta * rows / total, state.mean).to(state.mean.dtype),
        var=torch.where(some, spread / total, state.var).to(state.var.dtype),
        count=total,
    )


def _moments(returns: Tensor, valid: Tensor | None) -> Tensor:
    """Returns count, mean, variance and largest magnitude of the valid returns (the others are 0), [4] float64."""
    var, mean = torch.var_mean(returns, correction=0)
    count = torch.full_like(mean, returns.shape[0])
    if valid is not None:
        number = valid.sum().to(count.dtype)
        center = returns.sum() / number.clamp(min=1.0)
        spread = torch.where(valid, returns - center, 0.0).square().sum() / number.clamp(min=1.0)
        # One way of rounding where all are valid, whether they were asked about or not.
        mean, var = torch.where(valid.all(), mean, center), torch.where(valid.all(), var, spread)
        count = number
    return torch.stack([x.to(torch.float64) for x in (count, mean, var, returns.abs().amax())])


def _pool(ranks: Tensor) -> tuple[Tensor, ...]:
    """Joins the moments [R, 4] of all ranks from first to last (Chan, Golub and LeVeque 1983)."""
    first, *others = ranks.unbind(0)
    count, mean, var, largest = first.unbind(0)
    for more, other_mean, other_var, other_largest in (other.unbind(0) for other in others):
        delta, total = other_mean - mean, (count + more).clamp(min=1.0)
        var = (var * count + other_var * more + delta * delta * (count * more / total)) / total
        mean = mean + delta * more / total
        count, largest = count + more, torch.maximum(largest, other_largest)
    return count, mean, var, largest


def denominator(state: RewardScaleState, return_bound: float) -> Tensor:
    """Returns the 0-d divisor `max(sqrt(var + eps), max_abs / return_bound)` of a reward."""
    return torch.maximum(torch.sqrt(state.var + EPS), state.max_abs / return_bound)
