"""What follows the gradient in an update as one op: Adam, projection, the gate's selection and the target's average.

It is defined by `optim.adam`, `networks.project`, `tree.where` and `tree.lerp`, which are what it does but on a GPU:
there one Triton kernel reads parameters, gradient, moments and target once and writes them once. The kernel agrees with
the definition to rounding, and to the bit where the gate is closed. The op has no rule for `vmap`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, library

from functional_sac import networks
from functional_sac.networks import Actor, BatchNorm, Block, Critic, Trunk
from functional_sl import optim, tree, wire
from functional_sl.kernels import buildable
from functional_sl.optim import AdamState

BLOCK_LEAVES, TRUNK_LEAVES = 6, 4  # of a block, and of a trunk without its blocks


class Descended(NamedTuple):
    """What an update leaves behind."""

    params: Actor | Critic
    target: Actor | Critic | tuple[()]
    opt: AdamState


def descend(
    params: Actor | Critic,
    target: Actor | Critic | tuple[()],
    opt: AdamState,
    gradient: Tensor,
    ok: Tensor,
    rate: Tensor,
    tau: float,
) -> Descended:
    """Takes one projected step of `optim.adam` and moves the target towards its end, unless the gate is closed.

    Args:
      params: of a network, or of stacked ones.
      target: the average of such parameters, or ().
      opt: of the parameters, moments [P].
      gradient: [P].
      ok: () bool, the gate's.
      rate: (), the learning rate.
      tau: weight of the new parameters in the target.
    """
    leaves, structure = tree.flatten(params)
    others, target_structure = tree.flatten(target)
    count = opt.count + 1
    corrections = optim.corrections(count, rate)
    network = type(params).__name__
    found = _descend(network, leaves, others, gradient, opt.mu, opt.nu, ok, *corrections, tau)
    new, behind, (mu, nu) = found[: len(leaves)], found[len(leaves) : -2], found[-2:]
    opt = AdamState(torch.where(ok, count, opt.count), mu, nu)
    return Descended(tree.unflatten(structure, new), tree.unflatten(target_structure, behind), opt)


_destination: contextvars.ContextVar[tuple[Tensor, ...]] = contextvars.ContextVar("destination", default=())


@contextlib.contextmanager
def into(params: Actor | Critic, target: Actor | Critic | tuple[()], opt: AdamState) -> Iterator[None]:
    """Has the one call of `descend` in the block leave its results in these tensors, which are none that it reads."""
    token = _destination.set((*tree.leaves((params, target)), opt.mu, opt.nu))
    try:
        yield
    finally:
        _destination.reset(token)


@library.custom_op("functional_sac::descend", mutates_args=())
def _descend(
    network: str,
    params: Sequence[Tensor],
    target: Sequence[Tensor],
    gradient: Tensor,
    mu: Tensor,
    nu: Tensor,
    ok: Tensor,
    step: Tensor,
    root: Tensor,
    tau: float,
) -> list[Tensor]:
    """Returns the leaves of the parameters, then those of the target, then both moments."""
    old = tree.unflatten(tree.flatten(skeleton(network, len(params)))[1], params)
    new_mu, new_nu, denominator = optim.moments(gradient, mu, nu, root)
    flat = torch.cat([leaf.reshape(-1) for leaf in params]) + new_mu * step / denominator
    new = tree.where(ok, networks.project(wire.unpack(flat, old)), old)
    behind = list(target)
    if behind:
        behind = tree.where(ok, tree.lerp(behind, tree.leaves(new), tau), behind)
    found = [*tree.leaves(new), *behind, *tree.where(ok, [new_mu, new_nu], [mu, nu])]
    places = _destination.get()
    return [place.copy_(leaf) for place, leaf in zip(places, found, strict=True)] if places else found


@_descend.register_fake
def _(
    network: str, params: Sequence[Tensor], target: Sequence[Tensor], gradient: Tensor, mu: Tensor, nu: Tensor,
    *numbers: object,
) -> list[Tensor]:  # fmt: skip
    return [leaf.new_empty(leaf.shape) for leaf in (*params, *target, mu, nu)]


def skeleton(network: str, count: int) -> Actor | Critic:
    """Returns a network of `count` leaves that are no tensors.

    Args:
      network: `Actor` or `Critic`.
      count: of all leaves; it tells the number of blocks.
    """
    kind = {"Actor": Actor, "Critic": Critic}[network]
    heads, norm = len(kind._fields) - 1, BatchNorm(0, 0)
    blocks = (Block(0, norm, 0, norm),) * ((count - heads - TRUNK_LEAVES) // BLOCK_LEAVES)
    return kind(Trunk(norm, 0, blocks, 0), *[0] * heads)


if buildable():
    from functional_sac.fused import descent_kernels

    @_descend.register_kernel("cuda")
    def _(network: str, params: Sequence[Tensor], target: Sequence[Tensor], *given: object) -> list[Tensor]:
        names = tuple(tree.names(skeleton(network, len(params))))
        new = list(_destination.get()) or [leaf.new_empty(leaf.shape) for leaf in (*params, *target, *given[1:3])]
        return descent_kernels.descend(names, params, target, given[:3], given[3:6], given[6], new)
