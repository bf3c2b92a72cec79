"""Robotic World Model (arXiv:2501.10100): a recurrent network that forecasts on its own predictions.

    M frames of (state, action) -> [GRU of states | GRU of privileged facts] -> heads -> state at t + 1 as a Gaussian,
                                         ^                                             contacts, termination
    (drawn state, action at t + 1) ------+---------------------------------> t + 2, and so on

Two GRUs of the same sizes see the same inputs; one carries the states, the other contacts and termination. B members of
an ensemble are B sets of heads on them. A member's forecast starts from the history's hidden state, goes on with its
own states, and knows nothing of the other members.

The action of a frame is the one that is applied in it: state t and action t lead to state t + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.models import mlp, naming, normalizer, recurrent
from functional_sl.models.mlp import MLP
from functional_sl.models.normalizer import Normalizer
from functional_sl.models.recurrent import GRU

FIRST_KEEP = 2.0  # of a fresh model: a share of 0.88
LOG_STD = (-5.0, 1.0)  # soft bounds, of normalised states
FIRST_LOG_STD = -2.0  # of a fresh model: what it feeds back shall not drown what it has seen


class Architecture(NamedTuple):
    """The sizes of one model; static, so that a bundle can carry them as JSON."""

    states: int
    actions: int
    contacts: int
    hidden: int = 256  # of each layer of each GRU
    layers: int = 2
    head: int = 128  # hidden units of each head
    members: int = 1


class Heads(NamedTuple):
    """The outputs of one member; in `Model` every leaf has a leading axis [members]."""

    keep: Tensor  # [S], logit of the share of the last mean that the next one keeps
    mean: MLP
    log_std: MLP
    contact: MLP
    termination: MLP


class Model(NamedTuple):
    """The parameters."""

    bases: GRU  # leaves [2, ...]: of the states, of the privileged facts
    heads: Heads  # leaves [members, ...]


class Scales(NamedTuple):
    """The frozen statistics of the training set."""

    state: Normalizer  # [S]
    action: Normalizer  # [A]


class Forecast(NamedTuple):
    """N forecast steps of B windows by every member, in normalised units."""

    mean: Tensor  # [members, B, N, S]
    log_std: Tensor  # [members, B, N, S]
    contact: Tensor  # [members, B, N, C] logits
    termination: Tensor  # [members, B, N] logits


def init(key: Tensor, architecture: Architecture) -> Model:
    """Returns fresh parameters; every member has its own heads.

    Args:
      key: [2].
      architecture: the sizes.
    """
    a = architecture
    bases, heads = keys.split(key).unbind(0)
    made = [recurrent.init(k, a.states + a.actions, a.hidden, a.layers) for k in keys.split(bases).unbind(0)]
    return Model(tree.stack(made), tree.stack([_heads(k, a) for k in keys.split(heads, a.members).unbind(0)]))


def forecast(params: Model, states: Tensor, actions: Tensor, noise: Tensor | None = None) -> Forecast:
    """Returns what the members make of a history and of the actions that follow.

    A step's mean is a learned share of the mean before it (the history's last state at first) plus what the head adds.
    With the whole of it, as in the paper's code, small errors add up over hundreds of steps. What the GRUs read next is
    mean + std noise. Its gradient goes through the mean alone: through the std a later step's error would reward an
    overconfident earlier one. And a mean does not stand on the noise before it: a spread would then hold those of all
    steps before, feed on itself and grow.

    Args:
      params: of `init`.
      states: [B, M, S] normalised, oldest first.
      actions: [B, M + N - 1, A] normalised; the last N are those of the forecast steps, the first of them that of the
        history's last frame.
      noise: [members, B, N - 1, S] standard normal; None feeds the means back.
    """
    history, steps = states.shape[1], actions.shape[1] - states.shape[1] + 1
    members, rows = params.heads.mean[0].weight.shape[0], states.shape[0]
    shared = recurrent.scan(params.bases, torch.cat([states, actions[:, :history]], -1))
    # Members are further rows of one product with the GRUs' weights.
    hidden = tuple(h.repeat(1, members, 1) for h in shared)
    keep, mean, found = torch.sigmoid(params.heads.keep)[:, None], states[:, -1].expand(members, -1, -1), []
    for k in range(steps):
        own, privileged = hidden[-1].unflatten(1, (members, rows)).unbind(0)
        mean = keep * mean + _head(params.heads.mean, own)
        log_std = _bounded(_head(params.heads.log_std, own))
        logits = _head(params.heads.contact, privileged), _head(params.heads.termination, privileged)[..., 0]
        found.append((mean, log_std, *logits))
        if k + 1 < steps:
            fed = mean if noise is None else mean + torch.exp(log_std).detach() * noise[:, :, k]
            action = actions[:, history + k].expand(members, -1, -1)
            hidden = recurrent.step(params.bases, torch.cat([fed, action], -1).flatten(0, 1), hidden)
    return Forecast(*(torch.stack(parts, 2) for parts in zip(*found, strict=True)))


def roll_out(params: Model, states: Tensor, actions: Tensor, block: int) -> Forecast:
    """Returns a forecast of any length that feeds its means back and reads its last M frames anew after every block.

    The hidden state of a forecast is trained for M + N frames. Carried on for hundreds, it drifts, and the states with
    it; a window of M frames that moves along, as the paper has it, is what the model knows.

    Args:
      params: of `init`.
      states: [B, M, S] as in `forecast`.
      actions: [B, M + H - 1, A], likewise.
      block: steps from one reading to the next; every member reads its own.
    """
    history, total = states.shape[1], actions.shape[1]
    members = params.heads.keep.shape[0]
    first = forecast(params, states, actions[:, : history - 1 + block])
    found, past = [first], torch.cat([states.expand(members, -1, -1, -1), first.mean], 2)
    while past.shape[2] <= total:
        begin = past.shape[2] - history
        ahead = actions[:, begin : begin + history - 1 + block]
        own = [
            forecast(
                Model(params.bases, tree.map(lambda x, i=i: x[i : i + 1], params.heads)), past[i, :, begin:], ahead
            )
            for i in range(members)
        ]
        found.append(tree.concatenate(own))
        past = torch.cat([past, found[-1].mean], 2)
    return tree.concatenate(found, 2)


def likelihood(mean: Tensor, log_std: Tensor, target: Tensor, beta: float) -> Tensor:
    """Returns the negative log density of a Gaussian, weighted by std^(2 beta), element by element.

    The weight has no gradient (Seitzer et al., arXiv:2203.09168): at 0 it is the plain one, whose gradient neglects
    badly predicted states; at 1 the mean learns as by squared errors. With any of them the best std is the spread of
    the errors, not zero. Constants are left out.
    """
    value = 0.5 * torch.square((target - mean) * torch.exp(-log_std)) + log_std
    return value * torch.exp(2 * beta * log_std).detach() if beta else value


def predict(tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], *, block: int) -> dict[str, Tensor]:
    """Forecasts from the tensors and arguments of a bundle.

    Args:
      tensors: of `named`.
      inputs: `states` [B, M, S] and `actions` [B, M + N - 1, A] in the units of the data, as in `forecast`; N is free.
      block: of `roll_out`.

    Returns:
      `states` [B, N, S], the mean over members of forecasts that feed their own means back; `std`, root mean square of
      the members' standard deviations; `spread`, standard deviation of the members' means (0 for one member); both in
      the units of the data; `contacts` [B, N, C] and `terminations` [B, N], probabilities.
    """
    params, scales = unnamed(tensors)
    states = normalizer.normalize(scales.state, inputs["states"])
    found = roll_out(params, states, normalizer.normalize(scales.action, inputs["actions"]), block)
    return {
        "states": normalizer.denormalize(scales.state, found.mean.mean(0)),
        "std": scales.state.std * torch.exp(2 * found.log_std).mean(0).sqrt(),
        "spread": scales.state.std * found.mean.var(0, correction=0).sqrt(),
        "contacts": torch.sigmoid(found.contact).mean(0),
        "terminations": torch.sigmoid(found.termination).mean(0),
    }


def named(params: Model, scales: Scales) -> dict[str, Tensor]:
    """Returns the tensors by the names that `predict` takes."""
    return tree.named({"model": params, "scales": scales})


def unnamed(tensors: Mapping[str, Tensor]) -> tuple[Model, Scales]:
    """Returns parameters and statistics from `named` tensors."""
    found = naming.nested(tensors)
    bases = tuple(recurrent.Layer(**layer) for layer in found["model"]["bases"])
    heads = dict(found["model"]["heads"])
    keep = heads.pop("keep")
    made = {name: tuple(mlp.Linear(**layer) for layer in head) for name, head in heads.items()}
    scales = (Normalizer(**found["scales"][name]) for name in Scales._fields)
    return Model(bases, Heads(keep, **made)), Scales(*scales)


def _heads(key: Tensor, a: Architecture) -> Heads:
    sizes = (a.states, a.states, a.contacts, 1)
    mean, log_std, contact, termination = (
        mlp.init(k, (a.hidden, a.head, n)) for k, n in zip(keys.split(key, 4).unbind(0), sizes, strict=True)
    )
    first, last = log_std
    log_std = (first, last._replace(bias=last.bias + FIRST_LOG_STD))
    return Heads(torch.full((a.states,), FIRST_KEEP, device=key.device), mean, log_std, contact, termination)


def _head(head: MLP, x: Tensor) -> Tensor:
    hidden, out = head
    return recurrent.linear(F.relu(recurrent.linear(x, *hidden)), *out)


def _bounded(x: Tensor) -> Tensor:
    low, high = LOG_STD
    x = high - F.softplus(high - x)
    return low + F.softplus(x - low)
