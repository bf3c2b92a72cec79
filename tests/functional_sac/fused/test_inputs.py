"""Networks' inputs picked out of a replay's rows, against the concatenations of `losses`."""

from __future__ import annotations

import pytest
import torch
from torch import library

from functional_sac import losses, replay
from functional_sac.config import SACConfig
from functional_sac.distributions import Sample
from functional_sac.fused import inputs
from functional_sac.fused.inputs import Batch
from functional_sl import keys, tree

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
SYMMETRIC, WIDE = replay.Fields(11, 0, 3), replay.Fields(160, 289, 29)


def rows_of(columns: replay.Fields, device: str = "cpu") -> Batch:
    """Returns 50 rows, one of them with a NaN and an infinity, and 37 places, some of them the same."""
    rows = keys.normal(keys.key(0), (50, sum(columns.widths)))
    rows[7, 0], rows[7, columns.actor + columns.critic] = torch.nan, torch.inf
    places = keys.randint(keys.key(1), (37,), 0, 50)
    places[5] = 7
    return Batch(rows.to(device), places.to(device), columns, torch.tensor(2.0, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [SYMMETRIC, replay.Fields(5, 7, 2), WIDE])
def test_inputs_are_concatenations(device: str, columns: replay.Fields) -> None:
    lying = rows_of(columns, device)
    batch, action = lying.transition(), keys.normal(keys.key(2), (37, columns.action)).to(device)
    expected = losses.make_losses(SACConfig(lr_decay_updates=1), columns.action).critic_input(
        batch, Sample(action, action)
    )
    critic, actor = lying.critic_input(action), lying.actor_input()
    for found, parts in ((critic, expected), (actor, (torch.cat([o.actor for o in batch[::5]]),))):
        whole = torch.cat(parts, -1)
        assert found.shape == (74, -(-whole.shape[1] // 8) * 8)
        assert torch.equal(found[:, : whole.shape[1]].nan_to_num(9.0), whole.nan_to_num(9.0))
        assert not found[:, whole.shape[1] :].any()


@pytest.mark.parametrize("columns", [SYMMETRIC, WIDE])
def test_transitions_come_back(columns: replay.Fields) -> None:
    lying = rows_of(columns)
    batch = lying.transition()
    assert torch.equal(batch.reward, replay.unpack(lying.rows[lying.places], columns).reward / 2)
    assert inputs.batch(lying) is lying
    assert tree.bits_equal(inputs.batch(batch).transition(), batch)


def test_the_op_is_what_a_compiler_takes_it_for() -> None:
    lying = rows_of(WIDE)
    tail = torch.ones(37, 31)[:, :29]
    for arguments in (((160, 638), (318, 289), tail, 320), ((0,), (160,), None, 160)):
        library.opcheck(
            inputs.pick, (lying.rows, lying.places, *arguments), test_utils=("test_schema", "test_faketensor")
        )
