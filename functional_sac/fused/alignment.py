"""The weights of a trunk as its products read them: stacked, padded and in their type, by one op.

Between updates `descent` writes them anew together with the parameters.

On a GPU that is one Triton kernel over all leaves, elsewhere plain operations of the same bits. It has no rule for
`vmap`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, library

from functional_sac import networks
from functional_sac.networks import Trunk
from functional_sl import tree
from functional_sl.kernels import buildable

INPUT_WEIGHT = 2  # its place among the leaves


def aligned(trunks: Sequence[Trunk], dtype: torch.dtype) -> list[Tensor]:
    """Returns the leaves of stacked trunks as `trunk.forward` takes them.

    Args:
      trunks: leaves [M, ...], with an M of each trunk's own.
      dtype: of the products.

    Returns:
      Leaves [N, ...] in new memory, N the sum of all M, without the scale of the RMS norm; matrices are in the type
      of the products, and the rows of `w` have a multiple of eight features.
    """
    return _align(*parts(trunks), dtype)


def parts(trunks: Sequence[Trunk]) -> tuple[list[Tensor], list[int]]:
    """Returns the leaves of one trunk after the other, and the widths to which those of a trunk are padded."""
    leaves = [tree.leaves(trunk._replace(post_scale=())) for trunk in trunks]
    widths = [leaf.shape[-1] for leaf in leaves[0]]
    widths[INPUT_WEIGHT] += -widths[INPUT_WEIGHT] % networks.ALIGNMENT
    return [leaf for own in leaves for leaf in own], widths


def empty(trunks: Sequence[Trunk], dtype: torch.dtype) -> list[Tensor]:
    """Returns room for what `aligned` returns."""
    leaves, widths = parts(trunks)
    return [leaves[0].new_empty(shape, dtype=kind) for shape, kind in shapes(leaves, widths, dtype)]


def shapes(leaves: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype) -> list[tuple[list[int], torch.dtype]]:
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
    for i, (_, kind) in enumerate(shapes(leaves, widths, dtype)):
        parts = leaves[i :: len(widths)]
        found.append(torch.cat([F.pad(part, (0, widths[i] - part.shape[-1])) for part in parts]).to(kind))
    return found


@_align.register_fake
def _(leaves: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [leaves[0].new_empty(shape, dtype=kind) for shape, kind in shapes(leaves, widths, dtype)]


if buildable():
    from functional_sac.fused import alignment_kernels

    @_align.register_kernel("cuda")
    def _(leaves: Sequence[Tensor], widths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        outputs = [leaves[0].new_empty(shape, dtype=kind) for shape, kind in shapes(leaves, widths, dtype)]
        alignment_kernels.align(leaves, outputs)
        return outputs
