"""What follows the gradient in an update as one op: Adam, projection, the gate's selection and the target's average.

It is defined by `optim.adam`, `networks.project`, `tree.where` and `tree.lerp`, which are what it does but on a GPU:
there one Triton kernel reads parameters, gradient, moments and target once and writes them once, and with them, where
they are wanted, the copies that the next update's products read. The kernel agrees with the definition to rounding, and
to the bit where the gate is closed. The op has no rule for `vmap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, library

from functional_sac import networks
from functional_sac.fused import alignment
from functional_sac.fused.alignment import BLOCK_LEAVES, INPUT_LEAVES
from functional_sac.networks import Actor, BatchNorm, Block, Critic, Trunk
from functional_sl import optim, tree, wire
from functional_sl.kernels import buildable
from functional_sl.optim import AdamState


class Descended(NamedTuple):
    """What an update leaves behind."""

    params: Actor | Critic
    target: Actor | Critic | tuple[()]
    opt: AdamState
    copies: tuple[Tensor, ...]


def descend(
    params: Actor | Critic,
    target: Actor | Critic | tuple[()],
    opt: AdamState,
    gradients: Actor | Critic,
    ok: Tensor,
    rate: Tensor,
    tau: float,
    copies: torch.dtype | None = None,
    ranks: int = 1,
) -> Descended:
    """Takes one projected step of `optim.adam` and moves the target towards its end, unless the gate is closed.

    Args:
      params: of a network, or of stacked ones.
      target: the average of such parameters, or ().
      opt: of the parameters, moments [P].
      gradients: like the parameters, in types that theirs holds, summed over ranks; they may have gaps between rows.
      ok: () bool, the gate's.
      rate: (), the learning rate.
      tau: weight of the new parameters in the target.
      copies: the type of the products, for which the new ones are to be `alignment.aligned`: parameters, then target.
      ranks: how many the gradients are summed over; the step is taken with their mean.
    """
    leaves, structure = tree.flatten(params)
    others, target_structure = tree.flatten(target)
    count = opt.count + 1
    corrections = optim.corrections(count, rate)
    network = type(params).__name__
    slopes = tree.leaves(gradients)
    mu, nu, *found = _descend(network, leaves, others, slopes, opt.mu, opt.nu, ok, *corrections, tau, ranks, copies)
    opt = AdamState(torch.where(ok, count, opt.count), mu, nu)
    own, both = len(leaves), len(leaves) + len(others)
    new, behind = tree.unflatten(structure, found[:own]), tree.unflatten(target_structure, found[own:both])
    return Descended(new, behind, opt, tuple(found[both:]))


@library.custom_op("functional_sac::descend", mutates_args=())
def _descend(
    network: str,
    params: Sequence[Tensor],
    target: Sequence[Tensor],
    gradients: Sequence[Tensor],
    mu: Tensor,
    nu: Tensor,
    ok: Tensor,
    step: Tensor,
    root: Tensor,
    tau: float,
    ranks: int,
    copies: torch.dtype | None,
) -> list[Tensor]:
    """Returns both moments, then the leaves of the parameters, those of the target and the copies."""
    old = network_of(network, params)
    gradient = torch.cat([leaf.reshape(-1).to(mu.dtype) for leaf in gradients]) / ranks
    new_mu, new_nu, denominator = optim.moments(gradient, mu, nu, root)
    flat = torch.cat([leaf.reshape(-1) for leaf in params]) + new_mu * step / denominator
    new = tree.where(ok, networks.project(wire.unpack(flat, old)), old)
    behind = list(target)
    if behind:
        behind = tree.where(ok, tree.lerp(behind, tree.leaves(new), tau), behind)
    found = [*tree.where(ok, [new_mu, new_nu], [mu, nu]), *tree.leaves(new), *behind]
    return found if copies is None else [*found, *alignment.aligned(stacked(network, tree.leaves(new), behind), copies)]


@_descend.register_fake
def _(
    network: str, params: Sequence[Tensor], target: Sequence[Tensor], gradients: Sequence[Tensor], mu: Tensor,
    nu: Tensor, *numbers: object,
) -> list[Tensor]:  # fmt: skip
    found = [leaf.new_empty(leaf.shape) for leaf in (mu, nu, *params, *target)]
    return found if numbers[-1] is None else [*found, *alignment.empty(stacked(network, params, target), numbers[-1])]


def stacked(network: str, params: Sequence[Tensor], target: Sequence[Tensor]) -> list[Actor] | list[Critic]:
    """Returns the stacked networks, [N, ...], whose leaves those of parameters and target are."""
    found = [network_of(network, leaves) for leaves in (params, target) if leaves]
    return found if network == "Critic" else tree.map(lambda leaf: leaf.unsqueeze(0), found)


def network_of(network: str, leaves: Sequence[Tensor]) -> Actor | Critic:
    """Returns the network of which these are the leaves."""
    return tree.unflatten(tree.flatten(skeleton(network, len(leaves)))[1], leaves)


def skeleton(network: str, count: int) -> Actor | Critic:
    """Returns a network of `count` leaves that are no tensors.

    Args:
      network: `Actor` or `Critic`.
      count: of all leaves; it tells the number of blocks.
    """
    kind = {"Actor": Actor, "Critic": Critic}[network]
    heads, norm = len(kind._fields) - 1, BatchNorm(0, 0)
    in_blocks = count - INPUT_LEAVES - 1 - heads  # The one is the scale of the RMS norm.
    blocks = (Block(0, norm, 0, norm),) * (in_blocks // BLOCK_LEAVES)
    return kind(Trunk(norm, 0, blocks, 0), *[0] * heads)


if buildable():
    from functional_sac.fused import descent_kernels

    @_descend.register_kernel("cuda")
    def _(network: str, params: Sequence[Tensor], target: Sequence[Tensor], *given: object) -> list[Tensor]:
        *given, tau, ranks, dtype = given
        names = tuple(tree.names(skeleton(network, len(params))))
        copies = [] if dtype is None else alignment.empty(stacked(network, params, target), dtype)
        gradients, mu, nu, *numbers = given
        return descent_kernels.descend(names, params, target, gradients, (mu, nu), numbers, copies, tau, ranks)
