"""What critics' logits come to: the loss against the backed-up target, and the lower value; both with derivatives.

On a GPU each is one Triton kernel, elsewhere plain operations over `value`. The ops have no derivative of their own
and no rule for `vmap`: see `critic_heads` for who calls them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, library

from functional_sac import value
from functional_sac.fused import row_parts
from functional_sl.kernels import buildable

ROWS = 8  # of a part


@library.custom_op("functional_sac::categorical_loss", mutates_args=())
def loss(
    logits: Tensor,
    bias: Tensor,
    target_bias: Tensor,
    reward: Tensor,
    terminated: Tensor,
    entropy_term: Tensor,
    minimum: float,
    maximum: float,
    discount: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of two critics to the Bellman target of the lower one of two target critics.

    Args:
      logits: [4, B, W], of the critics, then of the target critics, before the bias; the columns behind the bins are
        no logits.
      bias: [2, bins] float32, the critics'.
      target_bias: [2, bins] float32, the target critics'.
      reward: [B] scaled.
      terminated: [B] bool.
      entropy_term: [B], see `value.bellman_target`.
      minimum: the lowest atom.
      maximum: the highest atom.
      discount: `gamma**n` in (0, 1].

    Returns:
      (loss, meaned over critics and rows, in parts [P] float32, which add up to it; its gradient in the critics'
      logits [2, B, W], zero behind the bins; its gradient in their bias, in parts [P, 2, bins] float32).
    """
    rows, width, bins = *logits.shape[1:], bias.shape[-1]
    atoms = _atoms(bias, minimum, maximum)
    online, target = (_log_probs(*pair) for pair in ((logits[:2], bias), (logits[2:], target_bias)))
    chosen = torch.exp(value.pessimistic(target, atoms))
    probs = value.bellman_target(chosen, reward, terminated, entropy_term, atoms, discount)
    found = -(probs * online).sum(-1).sum(0) / (2 * rows)
    gradient = (torch.exp(online) * probs.sum(-1, keepdim=True) - probs) / (2 * rows)
    padded = F.pad(gradient, (0, width - bins)).to(logits.dtype)
    return row_parts.sums(found, ROWS), padded, row_parts.sums(gradient.movedim(1, 0), ROWS)


@loss.register_fake
def _(logits: Tensor, bias: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    count = row_parts.count(logits.shape[1], ROWS)
    return bias.new_empty(count), logits.new_empty(2, *logits.shape[1:]), bias.new_empty(count, *bias.shape)


@library.custom_op("functional_sac::categorical_lower_value", mutates_args=())
def lower_value(logits: Tensor, bias: Tensor, minimum: float, maximum: float) -> tuple[Tensor, Tensor]:
    """Returns, row by row, the lower one of two critics' mean returns [B] and its derivative.

    Args:
      logits: [2, B, W], as in `loss`.
      bias: [2, bins] float32.
      minimum: the lowest atom.
      maximum: the highest atom.

    Returns:
      (values [B] float32, their derivatives in the logits [2, B, W]: zero behind the bins, and a tie shares evenly).
    """
    atoms, probs = _atoms(bias, minimum, maximum), torch.exp(_log_probs(logits, bias))
    mean = probs @ atoms
    lower = mean.amin(0)
    chosen = (mean == lower).to(mean.dtype)
    gradient = (chosen / chosen.sum(0)).unsqueeze(-1) * probs * (atoms - mean.unsqueeze(-1))
    return lower, F.pad(gradient, (0, logits.shape[-1] - bias.shape[-1])).to(logits.dtype)


@lower_value.register_fake
def _(logits: Tensor, bias: Tensor, minimum: float, maximum: float) -> tuple[Tensor, Tensor]:
    return bias.new_empty(logits.shape[1]), logits.new_empty(logits.shape)


def _atoms(bias: Tensor, minimum: float, maximum: float) -> Tensor:
    return value.support(minimum, maximum, bias.shape[-1], bias.device).to(bias.dtype)


def _log_probs(logits: Tensor, bias: Tensor) -> Tensor:
    return torch.log_softmax(logits[..., : bias.shape[-1]].to(bias.dtype) + bias.unsqueeze(1), -1)


if buildable():
    from functional_sac.fused import categorical_kernels

    loss.register_kernel("cuda")(lambda *given: categorical_kernels.loss(given[:6], *given[6:], ROWS))
    lower_value.register_kernel("cuda")(categorical_kernels.lower_value)
