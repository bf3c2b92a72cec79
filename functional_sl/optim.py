"""Gradient transforms as pairs of pure functions, with the rounding of `torch.optim` on the CPU.

A transform maps gradients to updates, and `apply_updates` adds updates to parameters. Trees may have any number
of leaves; one flat vector is the cheapest. Counts stay on the device, so that nothing here reads the host's
memory and a captured step goes on counting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import tree
from functional_sl.schedules import Schedule, constant
from functional_sl.tree import Tree

B1, B2, EPS = 0.9, 0.999, 1e-8


class Transform(NamedTuple):
    """Two closures over static hyper-parameters."""

    init: Callable[[Tree], Any]  # params -> state
    update: Callable[..., tuple[Tree, Any]]  # (grads, state, params=None) -> (updates, state)


class EmptyState(NamedTuple):
    """The state of a transform that remembers nothing."""


class SGDState(NamedTuple):
    """The state of `sgd`."""

    count: Tensor  # () int64, steps taken
    velocity: Tree  # like params; () without momentum


class AdamState(NamedTuple):
    """The state of `adam` and `adamw`."""

    count: Tensor  # () int64, steps taken
    mu: Tree  # like params, mean of the gradients
    nu: Tree  # like params, mean of their squares


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Returns `params + updates`, leaf by leaf."""
    return tree.add(params, updates)


def chain(*transforms: Transform) -> Transform:
    """Returns the transform that feeds each one's updates to the next; its state is the tuple of theirs."""

    def init(params: Tree) -> tuple:
        return tuple(transform.init(params) for transform in transforms)

    def update(grads: Tree, state: tuple, params: Tree | None = None) -> tuple[Tree, tuple]:
        states = []
        for transform, old in zip(transforms, state, strict=True):
            grads, new = transform.update(grads, old, params)
            states.append(new)
        return grads, tuple(states)

    return Transform(init, update)


def clip_by_global_norm(max_norm: float) -> Transform:
    """Scales the gradients by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    The norm is the L2 norm over all leaves. Of gradients that the gate lets pass it is finite, see `wire.limit`; an
    infinite one would leave nothing of them.

    Raises:
      ValueError: if `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(
            f"clip_by_global_norm: max_norm={max_norm} must be positive; leave it out of the chain instead"
        )

    def init(params: Tree) -> EmptyState:
        return EmptyState()

    def update(grads: Tree, state: EmptyState, params: Tree | None = None) -> tuple[Tree, EmptyState]:
        scale = torch.clamp(max_norm / (tree.norm(grads) + 1e-6), max=1.0)
        return tree.map(lambda g: g * scale, grads), state

    return Transform(init, update)


def sgd(learning_rate: float | Schedule, momentum: float = 0.0) -> Transform:
    """Returns gradient descent: velocity = momentum * velocity + gradient; update = -learning_rate * velocity.

    `torch.optim.SGD` fuses its last multiplication with the addition; here the product is rounded first, so a
    step may differ from torch's by one unit in the last place of the product or of the parameter.

    Args:
      learning_rate: a number, or a schedule evaluated at the count before the step.
      momentum: in [0, 1); 0 keeps no velocity.

    Raises:
      ValueError: if a number is out of its range.
    """
    schedule = _as_schedule(learning_rate)
    _check_decay("sgd", momentum=momentum)

    def init(params: Tree) -> SGDState:
        return SGDState(count=_zero_count(params), velocity=tree.zeros_like(params) if momentum else ())

    def update(grads: Tree, state: SGDState, params: Tree | None = None) -> tuple[Tree, SGDState]:
        rate = -schedule(state.count)
        velocity = tree.map(lambda v, g: v * momentum + g, state.velocity, grads) if momentum else ()
        updates = tree.map(lambda v: v * _for(v, rate), velocity if momentum else grads)
        return updates, SGDState(count=state.count + 1, velocity=velocity)

    return Transform(init, update)


def corrections(count: Tensor, rate: Tensor, b1: float = B1, b2: float = B2) -> tuple[Tensor, Tensor]:
    """Returns what Adam's bias corrections make of a step, as 0-d float64 tensors.

    Args:
      count: 0-d int64, the step's number, from 1.
      rate: 0-d, the learning rate.
      b1: as in `adam`.
      b2: as in `adam`.

    Returns:
      (the negative step size over the mean's correction, the root of the mean square's correction).
    """
    t = count.to(torch.float64)
    # A Python number over a tensor would be a reciprocal and a product in torch, rounded twice.
    return torch.div(rate, torch.pow(b1, t) - 1), torch.sqrt(1 - torch.pow(b2, t))


def moments(
    grads: Tree, mu: Tree, nu: Tree, root: Tensor, b1: float = B1, b2: float = B2, eps: float = EPS
) -> tuple[Tree, Tree, Tree]:
    """Returns Adam's new moments, and the denominators of its updates.

    Args:
      grads: the gradients.
      mu: their mean, like `grads`.
      nu: the mean of their squares, like `grads`.
      root: as `corrections` returns it.
      b1: as in `adam`.
      b2: as in `adam`.
      eps: as in `adam`.
    """
    mu = tree.map(lambda m, g: torch.lerp(m, g, 1 - b1), mu, grads)
    nu = tree.map(lambda v, g: torch.addcmul(v * b2, g, g, value=1 - b2), nu, grads)
    return mu, nu, tree.map(lambda v: v.sqrt() / _for(v, root) + eps, nu)


def adam(learning_rate: float | Schedule, b1: float = B1, b2: float = B2, eps: float = EPS) -> Transform:
    """Returns Adam (Kingma and Ba, arXiv:1412.6980, algorithm 1), with `torch.optim.Adam`'s rounding.

    Args:
      learning_rate: a number, or a schedule evaluated at the count before the step.
      b1: decay of the mean of the gradients, in [0, 1).
      b2: decay of the mean of their squares, in [0, 1).
      eps: added to the root of the mean square, after its bias correction.

    Raises:
      ValueError: if a number is out of its range.
    """
    schedule = _as_schedule(learning_rate)
    _check_decay("adam", b1=b1, b2=b2)
    _check_not_negative("adam", eps=eps)

    def update(grads: Tree, state: AdamState, params: Tree | None = None) -> tuple[Tree, AdamState]:
        state, step, denominators = _moments(grads, state, schedule(state.count), b1, b2, eps)
        return tree.map(lambda m, d: m * _for(m, step) / d, state.mu, denominators), state

    return Transform(_init_moments, update)


def adamw(
    learning_rate: float | Schedule,
    b1: float = B1,
    b2: float = B2,
    eps: float = EPS,
    weight_decay: float = 1e-2,
    mask: Callable[[Tree], Tree] | None = None,
) -> Transform:
    """Returns Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2).

    The moments have the bits of `torch.optim.AdamW`, and so has a leaf that does not decay. A leaf that decays
    agrees within one unit in the last place of its larger value, before or after the step: torch
    multiplies the parameter, which an update that is added cannot always match.

    Args:
      learning_rate: a number, or a schedule evaluated at the count before the step; it scales the decay as well.
      b1: decay of the mean of the gradients, in [0, 1).
      b2: decay of the mean of their squares, in [0, 1).
      eps: added to the root of the mean square, after its bias correction.
      weight_decay: parameters shrink by the factor 1 - learning_rate * weight_decay.
      mask: params -> a tree of Python bools like it, true where a leaf decays; None decays every leaf.

    Returns:
      A transform whose `update` needs `params`.

    Raises:
      ValueError: if a number is out of its range, or `update` gets no params.
    """
    schedule = _as_schedule(learning_rate)
    _check_decay("adamw", b1=b1, b2=b2)
    _check_not_negative("adamw", eps=eps, weight_decay=weight_decay)

    def update(grads: Tree, state: AdamState, params: Tree | None = None) -> tuple[Tree, AdamState]:
        if params is None:
            raise ValueError("adamw: update needs the parameters that decay; call update(grads, state, params)")
        rate = schedule(state.count)
        state, step, denominators = _moments(grads, state, rate, b1, b2, eps)
        shrink = 1 - rate * weight_decay

        def leaf(decays: bool, p: Tensor, m: Tensor, d: Tensor) -> Tensor:
            # Built from torch's own rounded result, which p + update restores but for the rounding of the update.
            step_ = _for(m, step)
            return torch.addcdiv(p * _for(p, shrink), m * step_, d) - p if decays else m * step_ / d

        decays = tree.map(lambda _: True, params) if mask is None else mask(params)
        return tree.map(leaf, decays, params, state.mu, denominators), state

    return Transform(_init_moments, update)


def _init_moments(params: Tree) -> AdamState:
    return AdamState(count=_zero_count(params), mu=tree.zeros_like(params), nu=tree.zeros_like(params))


def _moments(
    grads: Tree, state: AdamState, rate: Tensor, b1: float, b2: float, eps: float
) -> tuple[AdamState, Tensor, Tree]:
    """Returns the new state, the negative bias-corrected step size, and each leaf's denominator."""
    count = state.count + 1
    step, root = corrections(count, rate, b1, b2)
    mu, nu, denominators = moments(grads, state.mu, state.nu, root, b1, b2, eps)
    return AdamState(count=count, mu=mu, nu=nu), step, denominators


def _for(leaf: Tensor, number: Tensor) -> Tensor:
    """Returns the 0-d float64 `number` so that it does not promote `leaf`: a leaf with axes is not promoted anyway."""
    return number if leaf.ndim else number.to(leaf.dtype)


def _zero_count(params: Tree) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=tree.leaves(params)[0].device)


def _as_schedule(learning_rate: float | Schedule) -> Schedule:
    return learning_rate if callable(learning_rate) else constant(learning_rate)


def _check_decay(where: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < 1:
            raise ValueError(f"{where}: {name}={value} must lie in [0, 1)")


def _check_not_negative(where: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{where}: {name}={value} must be finite and not negative")
