"""Attention between things with places: scores turn with the way from one to the other, and heads are normalised."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl.models import precision

EPS = 1e-6

Turns = tuple[Tensor, Tensor]  # cosines and sines [..., 3 F]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_turns: Turns,
    key_turns: Turns,
    valid: Tensor,
    registers: int,
    *,
    positioned_queries: bool = False,
) -> Tensor:
    """Returns the attention of queries over valid keys [B, N, H * head]; registers, the first keys, have no place.

    A score is rotary where query and key both have a place, so that moving a whole scene sideways changes none.

    Args:
      query: [B, H, N, head].
      key: [B, H, M, head].
      value: [B, H, M, head].
      query_turns: of the queries' places, [B, N, 3 F] each.
      key_turns: of the keys' places.
      valid: [B, M] bool.
      registers: how many.
      positioned_queries: every query has a place; otherwise queries are the keys' things, registers among them.
    """
    plain = query @ key.mT
    turned = turn(query, *query_turns) @ turn(key, *key_turns).mT
    rows, columns = (torch.arange(n, device=plain.device) >= registers for n in plain.shape[-2:])
    both = columns if positioned_queries else rows[:, None] & columns
    scores = torch.where(both, turned, plain) / math.sqrt(query.shape[-1])
    weights = torch.softmax(torch.where(valid[:, None, None, :], scores, -torch.inf), -1)
    return (weights @ value).transpose(1, 2).flatten(-2)


def turns(places: Tensor, frequencies: int) -> Turns:
    """Returns cosines and sines [..., 3 F] of places [..., 3] m at wave lengths from 8 m down to 0.25 m."""
    with precision.full(places):
        exponents = torch.linspace(0.0, 1.0, frequencies, dtype=places.dtype, device=places.device)
        angle = (places[..., None] * (2 * math.pi / 8 * 32**exponents)).flatten(-2)
        return torch.cos(angle), torch.sin(angle)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns vectors [B, H, N, head] with their first 6 F channels turned, pairs half of those apart."""
    pairs = cos.shape[-1]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1)


def heads(x: Tensor, number: int) -> Tensor:
    """Returns [B, N, H * head] as [B, H, N, head]."""
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


def normed(x: Tensor, scale: Tensor) -> Tensor:
    """Returns x [..., C] over its root mean square, times the scale [C], in the scale's dtype."""
    return F.rms_norm(x.to(scale.dtype), x.shape[-1:], scale, EPS)
