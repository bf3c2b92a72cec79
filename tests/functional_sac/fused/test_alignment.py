"""Stacking, padding and casting networks' weights in one op, against doing so leaf by leaf."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICES
from torch import library

from functional_sac import networks
from functional_sac.fused import alignment
from functional_sac.networks import Critic
from functional_sl import keys, tree


def critics(seed: int, members: int, inputs: int) -> Critic:
    each = [networks.init_critic(k, inputs, 11, 24, 2)[0] for k in keys.split(keys.key(seed), members)]
    return tree.map(lambda x: x + 1 / 3, tree.stack(each))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("members", "inputs"), [((2, 2), 37), ((1,), 40), ((1, 3), 150)])
def test_critics_become_one_stack(device: str, dtype: torch.dtype, members: tuple[int, ...], inputs: int) -> None:
    each = [critics(seed, count, inputs) for seed, count in enumerate(members)]
    found = tree.to(alignment.aligned(tree.to(each, device), dtype), "cpu")
    trunk, w, _ = tree.concatenate(each)
    trunk = trunk._replace(w=F.pad(trunk.w, (0, -inputs % 8)))
    expected = [x.to(dtype) if x.ndim > 2 else x for x in (*tree.leaves(trunk), F.pad(w, (0, 0, 0, 5)))]
    assert tree.bits_equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_an_actors_heads_become_one(device: str) -> None:
    actor = tree.map(lambda x: x.unsqueeze(0) + 1 / 3, networks.init_actor(keys.key(0), 19, 5, 12, 1)[0])
    *trunk, w = tree.to(alignment.aligned([tree.to(actor, device)], torch.bfloat16), "cpu")
    assert [leaf.shape for leaf in trunk[3:]] == [leaf.shape for leaf in tree.leaves(actor.trunk)[3:]]
    assert tree.bits_equal(w[:, :10], torch.cat([actor.mean_w, actor.std_w], 1).bfloat16())
    assert w.shape == (1, 16, 12)
    assert not w[:, 10:].any()


def test_the_op_is_what_a_compiler_takes_it_for() -> None:
    leaves = tree.leaves(critics(0, 2, 37).trunk)
    arguments = (leaves, [37, 37, 40, *(leaf.shape[-1] for leaf in leaves[3:])], torch.bfloat16)
    library.opcheck(alignment._align, arguments, test_utils=("test_schema", "test_faketensor"))
