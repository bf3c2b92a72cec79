"""The weights of a network as its products read them: stacked, padded and in their type, by one op.

On a GPU that is one Triton kernel over all leaves, elsewhere plain operations of the same bits. It has no rule for
`vmap`. Between updates `descent` writes the same leaves anew together with the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, library

from functional_sac.networks import Actor, Critic
from functional_sac.padding import padded_size
from functional_sl import tree
from functional_sl.kernels import buildable

# A trunk's leaves are those of its input, of one block after the other, and the scale of the RMS norm.
INPUT_LEAVES, BLOCK_LEAVES = 3, 6
INPUT_WEIGHT = 2  # its place


def aligned(stacked: Sequence[Actor] | Sequence[Critic], dtype: torch.dtype) -> list[Tensor]:
    """Returns the leaves of stacked networks as products take them.

    Args:
      stacked: leaves [M, ...], with an M of each one's own.
      dtype: of the products.

    Returns:
      Leaves [N, ...] in new memory, N the sum of all M: those of the trunks as `trunk.forward` takes them, the scale
      of the RMS norm and the matrix of the head, of both heads as one. Matrices are in the type of the products; the
      rows of the trunks' `w` have a multiple of eight features, and a head has a multiple of eight rows.
    """
    return _unfolded(_align(*_flattened(stacked), dtype))


def _flattened(stacked: Sequence[Actor] | Sequence[Critic]) -> tuple[list[Tensor], list[int]]:
    """Returns the leaves of one network after the other, heads as one row, and the widths to which they are padded."""
    leaves = []
    for network in stacked:
        w, *others = _heads(network)
        w = torch.cat([w, *others], 1) if others else w
        leaves += [*tree.leaves(network.trunk), w.flatten(1).unsqueeze(1)]
    widths = [leaf.shape[-1] for leaf in leaves[: len(leaves) // len(stacked)]]
    widths[INPUT_WEIGHT] = padded_size(widths[INPUT_WEIGHT])
    widths[-1] = padded_size(w.shape[1]) * w.shape[2]
    return leaves, widths


def empty(stacked: Sequence[Actor] | Sequence[Critic], dtype: torch.dtype) -> list[Tensor]:
    """Returns room for what `aligned` returns."""
    leaves, heads = tree.leaves(stacked[0].trunk), _heads(stacked[0])
    sizes = [list(leaf.shape[1:]) for leaf in (*leaves, heads[0])]
    sizes[INPUT_WEIGHT][-1] = padded_size(sizes[INPUT_WEIGHT][-1])
    sizes[-1][0] = padded_size(sum(w.shape[1] for w in heads))
    count, kind = sum(network.trunk.post_scale.shape[0] for network in stacked), leaves[0].dtype
    return [leaves[0].new_empty(count, *size, dtype=dtype if len(size) > 1 else kind) for size in sizes]


def _heads(network: Actor | Critic) -> list[Tensor]:
    return [network.w] if isinstance(network, Critic) else [network.mean_w, network.std_w]


def _unfolded(leaves: list[Tensor]) -> list[Tensor]:
    """Returns leaves whose last one, a head, is [N, rows, H] again; before it lies the RMS norm's scale [N, H]."""
    *others, scale, head = leaves
    return [*others, scale, head.view(head.shape[0], -1, scale.shape[-1])]


def _shapes(leaves: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype) -> list[tuple[list[int], torch.dtype]]:
    """Returns the shapes and types of the stacked leaves."""
    found = []
    for i, width in enumerate(widths):
        parts = leaves[i :: len(widths)]
        shape = [sum(part.shape[0] for part in parts), *parts[0].shape[1:-1], width]
        found.append((shape, dtype if parts[0].ndim > 2 else parts[0].dtype))
    return found


@library.custom_op("functional_sac::align", mutates_args=())
def _align(leaves: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Returns as many leaves as there are widths, each stacked from those that lie so many places apart."""
    found = []
    for i, (_, kind) in enumerate(_shapes(leaves, widths, dtype)):
        parts = leaves[i :: len(widths)]
        found.append(torch.cat([F.pad(part, (0, widths[i] - part.shape[-1])) for part in parts]).to(kind))
    return found


@_align.register_fake
def _(leaves: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [leaves[0].new_empty(shape, dtype=kind) for shape, kind in _shapes(leaves, widths, dtype)]


if buildable():
    from functional_sac.fused import alignment_kernels

    @_align.register_kernel("cuda")
    def _(leaves: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        outputs = [leaves[0].new_empty(shape, dtype=kind) for shape, kind in _shapes(leaves, widths, dtype)]
        alignment_kernels.align(leaves, outputs)
        return outputs
