"""Networks' inputs picked out of a replay's rows, against the concatenations of `losses` and the norm of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICES
from torch import library

from functional_sac import losses, replay
from functional_sac.config import SACConfig
from functional_sac.distributions import Sample
from functional_sac.fused import inputs
from functional_sac.fused.inputs import Batch
from functional_sac.networks import BN_EPS, BatchNorm, Stats
from functional_sl import keys, tree

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "features", "begin"), [(1, 160, 478), (2, 37, 3), (3, 8, 0)])
@pytest.mark.parametrize("picked", [True, False])
def test_running_statistics_normalise_as_torchs(
    device: str, dtype: torch.dtype, count: int, features: int, begin: int, picked: bool
) -> None:
    """BF16 may be rounded to the other side, 2^-7; statistics lie among those of other layers."""
    lying, draw = rows_of(WIDE), iter(keys.split(keys.key(3), 4))
    lying.rows[9, begin + 5] = torch.nan
    norm = BatchNorm(*(keys.normal(next(draw), (count, features)) for _ in range(2)))
    stats = Stats(keys.normal(next(draw), (count, features + 7)), keys.uniform(next(draw), (count, features + 7)) + 0.5)
    stats = Stats(*(part[:, 3:-4] for part in stats))
    rows, norms, running = tree.to((lying.rows, norm, stats), device)
    found = inputs.normalised(rows, lying.places.to(device) if picked else None, begin, norms, running, dtype).cpu()
    x = (lying.rows[lying.places] if picked else lying.rows)[:, begin : begin + features]
    assert (found.dtype, found.shape) == (dtype, (count, len(x), -(-features // 8) * 8))
    assert not found[..., features:].any()
    for n in range(count):
        expected = F.batch_norm(x, stats.mean[n], stats.var[n], norm.scale[n], norm.bias[n], eps=BN_EPS)
        tolerance = {"rtol": 2**-7, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(found[n, :, :features].float(), expected, equal_nan=True, **tolerance)


def test_the_actors_next_input_is_normalised() -> None:
    lying = rows_of(SYMMETRIC)
    norm, stats = BatchNorm(torch.ones(1, 11), torch.zeros(1, 11)), Stats(torch.zeros(1, 11), torch.ones(1, 11))
    found = lying.next_actor_input(norm, stats, torch.float32)[0, :, :11]
    torch.testing.assert_close(found, lying.transition().next_observation.actor, rtol=1e-5, atol=0, equal_nan=True)


def test_the_ops_are_what_a_compiler_takes_them_for() -> None:
    lying = rows_of(WIDE)
    vectors = [torch.ones(2, 30) for _ in range(4)]
    for places in (lying.places, None):
        arguments = (lying.rows, places, 478, *vectors, torch.bfloat16)
        library.opcheck(inputs._normalised, arguments, test_utils=("test_schema", "test_faketensor"))
    tail = torch.ones(37, 31)[:, :29]
    for arguments in (((160, 638), (318, 289), tail, 320), ((0,), (160,), None, 160)):
        library.opcheck(
            inputs.pick, (lying.rows, lying.places, *arguments), test_utils=("test_schema", "test_faketensor")
        )
