"""RigidFormer in a size of seconds, and scenes that no simulator made."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from functional_sl import keys, tree
from functional_sl.recipe import Recipe
from functional_sl.recipes.rigidformer import RigidFormer
from functional_sl.sources.rigid_bodies import Scenes

TINY = RigidFormer(
    scenes=6, validation_scenes=3, objects=(1, 3), points=(24, 28), frames=24, steps=(1, 3), clip=5, channels=6,
    width=10, layers=1, heads=2, head_size=12, frequencies=2, registers=2, anchor=8, depths=(0, 1), horizons=(5, 10),
)  # fmt: skip


def made(count: int = 6, seed: int = 0) -> Scenes:
    """Scenes without a simulator: bodies that move evenly, but for noise."""
    a, b, c, d, e = keys.split(keys.key(seed), 5).unbind(0)
    objects = torch.arange(3) < torch.tensor([1, 3, 2, 3, 2, 1, 3, 2])[:count, None]
    mask = (torch.arange(10) < keys.randint(a, (count, 3, 1), 4, 11)) & objects[..., None]
    time = torch.arange(24.0)[:, None, None]
    positions = 0.3 * keys.normal(b, (count, 1, 3, 3)) + 0.01 * time * keys.normal(c, (count, 1, 3, 3))
    turns = keys.normal(d, (count, 1, 3, 4)) + 0.02 * time * keys.normal(e, (count, 1, 3, 4))
    return Scenes(
        positions=positions + torch.tensor([0.0, 0.0, 0.5]),
        quaternions=F.normalize(turns, dim=-1),
        points=0.1 * keys.normal(a, (count, 3, 10, 3)) * mask[..., None],
        point_mask=mask,
        objects=objects,
        properties=torch.where(objects[..., None], torch.tensor([1.0, 0.5, 0.4]), 0.0),
        kinds=torch.zeros(count, 3, dtype=torch.int64),
        lengths=torch.tensor([24, 20, 24, 24, 24, 22, 24, 24])[:count],
    )


def started(task: Recipe) -> dict:
    """Parameters in general position."""
    params, buffers = task.init(keys.key(0))
    assert buffers == ()
    noise = iter(keys.split(keys.key(1), len(tree.leaves(params))))
    return tree.map(lambda x: x + 0.1 * keys.normal(next(noise), tuple(x.shape)), params)
