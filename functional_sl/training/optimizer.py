"""The optimizer that the settings name, as one transform over the packed gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_sl import optim, schedules, tree
from functional_sl.schedules import Schedule
from functional_sl.training.config import TrainConfig


def learning_rate(config: TrainConfig) -> Schedule:
    """Returns the rate at every count: a warm-up from 0, then constant, linear or cosine to `lr_end`.

    Args:
      config: with `lr_decay_updates` settled where the rate decays.
    """
    peak, end, warmup = config.learning_rate, config.lr_end, config.lr_warmup_updates
    rest = max(config.lr_decay_updates - warmup, 1)
    after = {
        "constant": lambda: schedules.constant(peak),
        "linear": lambda: schedules.linear(peak, end, rest),
        "cosine": lambda: schedules.warmup_cosine(peak, peak, end, 0, rest),
    }[config.lr_schedule]()
    if not warmup:
        return after
    rise = schedules.linear(0.0, peak, warmup)

    def schedule(count: Tensor) -> Tensor:
        return torch.where(count < warmup, rise(count), after(count - warmup))

    return schedule


def transform(config: TrainConfig) -> optim.Transform:
    """Returns clipping, weight decay and the optimizer in the order of `torch.optim`."""
    rate = learning_rate(config)
    if config.optimizer == "sgd":
        chosen = [optim.sgd(rate, config.momentum)]
        chosen = [_decayed(config.weight_decay), *chosen] if config.weight_decay else chosen
    elif config.optimizer == "adamw":
        chosen = [optim.adamw(rate, config.b1, config.b2, config.eps, config.weight_decay)]
    else:
        chosen = [optim.adam(rate, config.b1, config.b2, config.eps)]
    clip = [optim.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    return optim.chain(*clip, *chosen)


def _decayed(weight_decay: float) -> optim.Transform:
    """Adds the gradient of an L2 term, as `torch.optim.SGD` does."""

    def update(grads: tree.Tree, state: optim.EmptyState, params: tree.Tree) -> tuple[tree.Tree, optim.EmptyState]:
        return tree.map(lambda g, p: g + weight_decay * p, grads, params), state

    return optim.Transform(lambda params: optim.EmptyState(), update)
