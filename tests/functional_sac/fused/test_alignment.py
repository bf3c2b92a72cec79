"""Stacking, padding and casting a trunk's weights in one op, against doing so leaf by leaf."""

from __future__ import annotations

import pytest
import torch
from torch import library

from functional_sac import networks
from functional_sac.fused import alignment
from functional_sac.networks import Trunk
from functional_sl import keys, tree

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def critics(seed: int, members: int, inputs: int) -> Trunk:
    each = [networks.init_critic(k, inputs, 11, 24, 2)[0].trunk for k in keys.split(keys.key(seed), members)]
    return tree.map(lambda x: x + 1 / 3, tree.stack(each))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("members", "inputs"), [((2, 2), 37), ((1,), 40), ((1, 3), 150)])
def test_trunks_become_one_stack(device: str, dtype: torch.dtype, members: tuple[int, ...], inputs: int) -> None:
    trunks = [critics(seed, count, inputs) for seed, count in enumerate(members)]
    found = tree.to(alignment.aligned(tree.to(trunks, device), dtype), "cpu")
    stacked = tree.map(lambda *parts: torch.cat(parts), *trunks)
    stacked = stacked._replace(w=torch.nn.functional.pad(stacked.w, (0, -inputs % 8)), post_scale=())
    expected = [x.to(dtype) if x.ndim > 2 else x for x in tree.leaves(stacked)]
    assert tree.bits_equal(found, expected)


def test_the_op_is_what_a_compiler_takes_it_for() -> None:
    leaves = tree.leaves(critics(0, 2, 37))
    arguments = (leaves, [37, 37, 40, *(leaf.shape[-1] for leaf in leaves[3:])], torch.bfloat16)
    library.opcheck(alignment._align, arguments, test_utils=("test_schema", "test_faketensor"))
