"""The networks' inputs straight out of a replay's rows: picked, concatenated and padded by one op.

A row has what the critics see and the action side by side, so that a pass reads two pieces of a row and writes its
input once. On a GPU that is one Triton kernel, elsewhere plain operations of the same bits. Where networks are only
read, the norm by running statistics is in it, and both agree to roundings. The ops have no rule for `vmap`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, library

from functional_sac import replay
from functional_sac.networks import BN_EPS, BatchNorm, Stats
from functional_sac.padding import padded, padded_size
from functional_sac.transition import Transition
from functional_sl.kernels import buildable

KERNELS = buildable()


@dataclasses.dataclass(frozen=True)
class Batch:
    """Transitions that still lie in the rows of a replay.

    Attributes:
      rows: [R, W].
      places: [B] int64, the rows of the transitions.
      columns: of a row.
      divisor: () of the rewards.
    """

    rows: Tensor
    places: Tensor
    columns: replay.Fields
    divisor: Tensor

    def transition(self) -> Transition:
        """Returns the transitions [B, ...], rewards divided."""
        found = replay.unpack(self.rows.index_select(0, self.places), self.columns)
        return found._replace(reward=found.reward / self.divisor)

    def actor_input(self) -> Tensor:
        """Returns what the actor sees, now, then next, as [2B, K] with zeros up to a multiple of eight."""
        now, _, _, after, *_ = self._begins
        return self._picked((now, after), (self.columns.actor,) * 2, None)

    def critic_input(self, next_action: Tensor) -> Tensor:
        """Returns the critics' input [2B, K], see `losses.critic_input`, with zeros up to a multiple of eight."""
        actor, critic, _, next_actor, next_critic, *_ = self._begins
        observed, begins = self.columns.critic, (critic, next_critic)
        if not observed:
            observed, begins = self.columns.actor, (actor, next_actor)
        return self._picked(begins, (observed + self.columns.action, observed), next_action)

    def next_actor_input(self, norm: BatchNorm, stats: Stats, dtype: torch.dtype) -> Tensor:
        """Returns what the actor sees next, see `normalised`."""
        return normalised(self.rows, self.places, self._begins[3], norm, stats, dtype)

    @property
    def _begins(self) -> list[int]:
        return list(itertools.accumulate(self.columns.widths, initial=0))

    def _picked(self, begins: tuple[int, int], counts: tuple[int, int], tail: Tensor | None) -> Tensor:
        return pick(self.rows, self.places, begins, counts, tail, padded_size(counts[0]))


def batch(transition: Transition | Batch) -> Batch:
    """Returns transitions [B, ...] as rows of their own, unless they lie in rows already."""
    if isinstance(transition, Batch):
        return transition
    actor, critic = transition.observation
    columns = replay.Fields(actor.shape[-1], critic.shape[-1], transition.action.shape[-1])
    places = torch.arange(actor.shape[0], device=actor.device)
    return Batch(replay.pack(transition), places, columns, actor.new_ones(()))


@library.custom_op("functional_sac::pick", mutates_args=())
def pick(
    rows: Tensor, places: Tensor, begins: Sequence[int], counts: Sequence[int], tail: Tensor | None, width: int
) -> Tensor:
    """Takes pieces of rows, each as one block, and puts the blocks under each other.

    Args:
      rows: [R, W].
      places: [B] int64, which rows.
      begins: the first column of each piece.
      counts: its number of columns.
      tail: [B, T], stands behind the last piece; or None.
      width: K, of the blocks.

    Returns:
      [P B, K] of P pieces, zeros where nothing stands.
    """
    picked = rows.index_select(0, places)
    pieces = [picked.narrow(1, begin, count) for begin, count in zip(begins, counts, strict=True)]
    if tail is not None:
        pieces[-1] = torch.cat([pieces[-1], tail], -1)
    return torch.cat([F.pad(piece, (0, width - piece.shape[1])) for piece in pieces])


@pick.register_fake
def _(
    rows: Tensor, places: Tensor, begins: Sequence[int], counts: Sequence[int], tail: Tensor | None, width: int
) -> Tensor:
    return rows.new_empty(len(begins) * places.shape[0], width)


def normalised(
    rows: Tensor, places: Tensor | None, begin: int, norm: BatchNorm, stats: Stats, dtype: torch.dtype
) -> Tensor:
    """Takes one piece of rows, the common input of N networks, and normalises it by running statistics.

    Args:
      rows: [R, W].
      places: [B] int64, which rows; or None, all of them.
      begin: the first column of the piece.
      norm: [N, F] of its F columns.
      stats: [N, F] likewise.
      dtype: of the products.

    Returns:
      [N, B, K] with zeros up to a multiple of eight.
    """
    run = _normalised if rows.is_cuda and KERNELS else _plain_normalised
    return run(rows, places, begin, *norm, *stats, dtype)


def _plain_normalised(
    rows: Tensor, places: Tensor | None, begin: int, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    x = (rows if places is None else rows.index_select(0, places)).narrow(1, begin, scale.shape[1])
    slope = scale * torch.rsqrt(var + BN_EPS)
    return padded(torch.addcmul((bias - mean * slope).unsqueeze(1), x, slope.unsqueeze(1))).to(dtype)


_normalised = library.custom_op("functional_sac::pick_normalised", _plain_normalised, mutates_args=())


@_normalised.register_fake
def _(
    rows: Tensor, places: Tensor | None, begin: int, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    count, features = scale.shape
    size = (rows if places is None else places).shape[0]
    return rows.new_empty(count, size, padded_size(features), dtype=dtype)


if KERNELS:
    from functional_sac.fused import input_kernels

    pick.register_kernel("cuda")(input_kernels.pick)
    _normalised.register_kernel("cuda")(input_kernels.normalised)
