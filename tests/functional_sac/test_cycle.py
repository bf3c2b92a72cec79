"""The cycle's promises one by one: phases, draws, gates, counters, precision, purity."""

from __future__ import annotations

import functools

import pytest
import torch
from equal import all_finite, assert_bits_equal
from torch import Tensor

from functional_sac import cycle, replay, reward_scale
from functional_sac.config import SACConfig
from functional_sac.cycle import Learner, SACState
from functional_sac.envs.env import EnvSpec
from functional_sac.replay import ReplayState
from functional_sl import capture, keys, tree

SPEC = EnvSpec(task="planted", actor_dim=3, critic_dim=0, action_dim=2, max_episode_steps=10, control_dt=0.1)
COLUMNS = replay.fields(SPEC)
ROWS = 64
SCALE = reward_scale.init(4)
SETTINGS = {
    "batch_size": 16, "updates_per_step": 1, "actor_width": 8, "critic_width": 8, "num_blocks": 1, "bins": 11,
    "lr_init": 1e-3, "lr_peak": 1e-3, "lr_decay_updates": 100, "replay_capacity": ROWS, "learning_starts": 0,
}  # fmt: skip


@functools.cache
def learner(**changes: object) -> Learner:
    return cycle.make_learner(SACConfig(**SETTINGS | changes), SPEC)


def state(**changes: object) -> SACState:
    return learner(**changes).init(keys.key(0))


def planted() -> ReplayState:
    """A full ring of random rows, a quarter of them terminated."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, sum(COLUMNS.widths), generator=generator)
    rows[:, -2:] = 0.0
    rows[::4, -2] = 1.0
    empty = replay.init(COLUMNS, ROWS, 4)
    return empty._replace(rows=rows, size=torch.tensor(ROWS), cursor=torch.tensor(0))


def moved(before: SACState, after: SACState) -> set[str]:
    """Tells which parts have other bits; of a step's state only what its gate selects counts."""
    parts = {
        "actor": lambda s: s.actor[:3],
        "critic": lambda s: s.critic[:3],
        "temperature": lambda s: s.temperature[:3],
    }
    parts |= {"target": lambda s: s.target, "scale": lambda s: s.scale}
    return {name for name, of in parts.items() if not tree.bits_equal(of(before), of(after))}


@pytest.mark.parametrize("count", ["global", "cycle"])
@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_phases(k: int, period: int, count: str) -> None:
    """Over 12 cycles the actor takes part in every period-th update, counted over the run or anew in each cycle."""
    config = SACConfig(updates_per_step=k, actor_update_period=period, actor_count=count)
    pattern = [acts for i in range(12) for acts in cycle.with_actor(config, i % cycle.phases(config))]
    updates = range(12 * k)
    assert pattern == [(u if count == "global" else u % k) % period == 0 for u in updates]
    assert cycle.phases(config) <= period


@pytest.mark.parametrize(
    ("k", "count", "expected"), [(1, "global", [1, 1, 2]), (1, "cycle", [1, 2, 3]), (6, "global", [3, 6, 9])]
)
def test_the_optimizers_count_what_they_did(k: int, count: str, expected: list[int]) -> None:
    learn = learner(updates_per_step=k, actor_count=count)
    s, seen = state(updates_per_step=k, actor_count=count), []
    for i in range(3):
        before = s
        s, metrics = learn.cycle(s, planted(), SCALE, i % learn.phases)
        seen.append(int(s.actor.opt.count))
        acted = "actor" in moved(before, s)
        assert acted == ("temperature" in moved(before, s)) == ("actor_loss" in metrics)
        assert {"critic", "target"} <= moved(before, s)
        assert s.critic.opt.count == s.updates == k * (i + 1)
        assert s.temperature.opt.count == s.actor.opt.count
    assert seen == expected


def test_every_update_has_rows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six updates, three cycles: 18 different index sets; the same seed draws the same again."""
    seen: list[tuple[int, ...]] = []
    original = replay.indices

    def record(buffer: ReplayState, key: Tensor, shape: tuple[int, ...], reserved: int) -> Tensor:
        rows = original(buffer, key, shape, reserved)
        seen.extend(tuple(update) for update in rows.reshape(6, 16).tolist())
        return rows

    monkeypatch.setattr(replay, "indices", record)
    for _ in range(2):
        s = state(updates_per_step=6)
        for _ in range(3):
            s, _ = learner(updates_per_step=6).cycle(s, planted(), SCALE, 0)
    assert seen[:18] == seen[18:]
    assert len({tuple(sorted(rows)) for rows in seen[:18]}) == 18
    assert {len(rows) for rows in seen} == {16}


def test_updates_by_hand_are_the_cycle() -> None:
    """K updates on the rows and the noise that the state's key gives, rewards divided by the scale."""
    learn, s, buffer = learner(updates_per_step=3), state(updates_per_step=3), planted()
    scale = SCALE._replace(var=torch.tensor(4.0), max_abs=torch.tensor(50.0))  # the larger of 2 and 50 / 5
    found, metrics = learn.cycle(s, buffer, scale, 1)
    key, rows_key, noise_key = keys.split(s.key, 3)
    rows, noise = replay.indices(buffer, rows_key, (3, 16)), keys.normal(noise_key, (3, 48, 2))
    s, losses = s._replace(key=key), []
    for i, acts in enumerate([False, True, False]):  # the second cycle begins at update 3
        batch = replay.gather(buffer, rows[i], COLUMNS)
        batch = batch._replace(reward=batch.reward / 10)
        s, one = learn.update(s, batch, noise[i, :32], noise[i, 32:], acts)
        losses.append(one["critic_loss"])
    assert_bits_equal(found, s)
    assert metrics["critic_loss"] == pytest.approx(sum(map(float, losses)) / 3, rel=1e-6)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("phase", [0, 1, 2])
def test_critics_meet_the_policy_of_their_update(phase: int, first: bool) -> None:
    """Seven updates with an actor in every third, whose cycles begin anywhere in its period; samples are shared.

    Their rows go through one product together, which may round otherwise.
    """
    settings = {"updates_per_step": 7, "actor_update_period": 3, "critic_first": first}
    learn, s, buffer = learner(**settings), state(**settings), planted()
    found, _ = learn.cycle(s, buffer, SCALE, phase)
    key, rows_key, noise_key = keys.split(s.key, 3)
    rows, noise = replay.indices(buffer, rows_key, (7, 16)), keys.normal(noise_key, (7, 48, 2))
    s = s._replace(key=key)
    for i in range(7):
        batch = replay.gather(buffer, rows[i], COLUMNS)
        s, _ = learn.update(s, batch, noise[i, :32], noise[i, 32:], (7 * phase + i) % 3 == 0)
    torch.testing.assert_close(found, s, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("first", "order"), [(False, "fpfccpfccpcc"), (True, "fcpfccpfccpc")])
def test_what_is_foreseen_is_what_the_update_finds(first: bool, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six fused updates, three with a policy's: its forward pass (f) comes before critics' updates that change none.

    In the first update of a cycle whose policy goes first, it has none to come before.
    """
    monkeypatch.setattr(cycle, "MOST_SHARING", 1)  # samples that are made together may round otherwise
    settings = {"updates_per_step": 6, "critic_first": first}
    called = []

    def wrap(region: cycle.Region) -> cycle.Region:
        def call(*arguments: tree.Tree) -> tuple[tree.Tree, cycle.Metrics]:
            called.append(region.__name__)
            return region(*arguments)

        return call

    learn = cycle.make_learner(SACConfig(**SETTINGS | settings), SPEC, wrap=wrap, fused=True)
    s, buffer = state(**settings), planted()
    found, _ = learn.cycle(s, buffer, SCALE, 0)
    assert "".join(name[0] for name in called if name in ("foresee", "policy", "critics")) == order
    key, rows_key, noise_key = keys.split(s.key, 3)
    rows, noise = replay.indices(buffer, rows_key, (6, 16)), keys.normal(noise_key, (6, 48, 2))
    s = s._replace(key=key)
    for i in range(6):
        batch = replay.gather(buffer, rows[i], COLUMNS)
        s, _ = learn.update(s, batch, noise[i, :32], noise[i, 32:], i % 2 == 0)
    assert_bits_equal(found, s)


def test_samples_are_shared_in_few_numbers() -> None:
    """Each is a shape to compile, of which Dynamo takes eight; every one of the 110 updates gets its sample."""
    config = SACConfig(
        batch_size=2, updates_per_step=11, actor_update_period=10, actor_width=8, critic_width=8, num_blocks=1, bins=3,
        lr_decay_updates=100, replay_capacity=ROWS, learning_starts=0,
    )  # fmt: skip
    seen = []

    def wrap(region: cycle.Region) -> cycle.Region:
        def call(*arguments: tree.Tree) -> tuple[tree.Tree, cycle.Metrics]:
            part, found = region(*arguments)
            seen.extend([len(found["log_prob"])] if "log_prob" in found else [])
            return part, found

        return call

    learn = cycle.make_learner(config, SPEC, wrap=wrap)
    for phase in range(learn.phases):
        learn.cycle(learn.init(keys.key(0)), planted(), SCALE, phase)
    assert learn.phases == 10
    assert sum(seen) == 110
    assert len(set(seen)) <= 4


def test_the_order_of_an_update() -> None:
    """Critic first: the critic does not see the new actor. Actor first: the actor does not see the new critic."""
    buffer, results = planted(), {}
    for first in (False, True):
        learn, s = learner(critic_first=first), state(critic_first=first)
        results[first] = learn.cycle(s, buffer, SCALE, 0)[0]
        alone = learn.cycle(s, buffer, SCALE, 1)[0]  # no actor in this phase
        assert ("critic" not in moved(results[first], alone)) == first
        assert ("target" not in moved(results[first], alone)) == first
    assert {"actor", "critic", "target"} <= moved(results[False], results[True])


def test_the_target_follows_the_critic() -> None:
    """target + tau (critic - target), parameters; its statistics move with the critic's loss (B21)."""
    s = state()
    after, _ = learner().cycle(s, planted(), SCALE, 1)
    expected = tree.map(lambda t, c: t + 0.01 * (c - t), s.target, after.critic.params)
    torch.testing.assert_close(after.target, expected, rtol=1e-6, atol=1e-7)
    assert not tree.bits_equal(after.critic.stats.target, s.critic.stats.target)


@pytest.mark.parametrize("column", ["reward", "observation", "next observation"])
def test_bad_rows_close_the_gates(column: str) -> None:
    """NaN in every row: nothing that a gate selects moves; keys and counts go on, and good rows heal it."""
    learn, s, good = learner(updates_per_step=2), state(updates_per_step=2), planted()
    place = {"reward": -3, "observation": 0, "next observation": COLUMNS.actor + COLUMNS.action}[column]
    bad = good._replace(rows=good.rows.clone())
    bad.rows[:, place] = float("nan")
    s, _ = learn.cycle(s, good, SCALE, 0)
    after, _ = learn.cycle(s, bad, SCALE, 0)
    # A NaN reward does not concern the actor.
    assert moved(s, after) == ({"actor", "temperature"} if column == "reward" else set())
    assert [int(x) for x in after.critic.gate] == [2, 2]
    assert [int(x) for x in after.actor.gate] == ([0, 0] if column == "reward" else [1, 1])
    assert after.updates == s.updates + 2
    assert not torch.equal(after.key, s.key)
    healed, metrics = learn.cycle(after, good, SCALE, 0)
    assert {"actor", "critic", "target", "temperature"} <= moved(after, healed)
    assert all(value.isfinite() for value in metrics.values())
    assert [int(x) for x in healed.critic.gate] == [2, 0]
    assert all_finite(healed)


def test_a_float16_overflow_halves_the_scale_and_moves_nothing() -> None:
    """2^24 times a derivative above 2^-8 is infinite in float16."""
    s = state(compute_dtype="float16")
    learn = learner(compute_dtype="float16")
    high = s._replace(scale=s.scale._replace(scale=torch.tensor(2.0**24)))
    after, metrics = learn.cycle(high, planted(), SCALE, 1)
    assert moved(high, after) == {"scale"}
    assert after.scale.scale == 2.0**23
    assert after.critic.opt.count == 0
    assert after.critic.gate.skipped == 1
    assert metrics["critic_loss"].isfinite()
    while after.critic.opt.count == 0:  # one halving an update, until it fits
        after, _ = learn.cycle(after, planted(), SCALE, 1)
        assert after.scale.scale == 2.0 ** (24 - int(after.critic.gate.skipped)) >= 256
    assert {"critic", "target"} <= moved(high, after)


def test_float16_is_the_unscaled_step_to_round_off() -> None:
    """Whatever the scale, as long as nothing overflows or underflows."""
    learn, s = learner(compute_dtype="float16"), state(compute_dtype="float16")
    low, lower = (s._replace(scale=s.scale._replace(scale=torch.tensor(x))) for x in (1024.0, 256.0))
    found, expected = (learn.cycle(x, planted(), SCALE, 0)[0] for x in (low, lower))
    torch.testing.assert_close(found.critic.opt.mu, expected.critic.opt.mu, rtol=0, atol=1e-4)
    assert found.critic.gate.skipped == found.actor.gate.skipped == 0
    assert found.scale.growth == 2  # actor and critic share one scale


@pytest.mark.parametrize("start", [2**24, 2**31 - 1, 2**40])
def test_counters_keep_counting(start: int) -> None:
    """Past float32's integers and int32's range; Adam's step stays finite."""
    learn, s = learner(updates_per_step=2), state(updates_per_step=2)
    s = tree.map(lambda x: torch.full_like(x, start) if x.dtype == torch.int64 and x.ndim == 0 else x, s)
    after, _ = learn.cycle(s, planted(), SCALE, 0)
    counts = [after.updates, after.critic.opt.count, after.actor.opt.count]
    assert [int(c) - start for c in counts] == [2, 2, 1]
    assert after.critic.gate.skipped == start
    assert learn.rate(after.updates) == pytest.approx(1.5e-4)
    assert {"critic", "actor"} <= moved(s, after)
    assert all_finite(after)


def test_pure_and_apart() -> None:
    """Arguments keep their bits, and no two leaves of a state share memory."""
    s, buffer = state(updates_per_step=2), planted()
    assert tree.overlapping(s) is None
    before = tree.clone((s, buffer, SCALE))
    after, metrics = learner(updates_per_step=2).cycle(s, buffer, SCALE, 0)
    assert_bits_equal((s, buffer, SCALE), before)
    assert tree.overlapping(after) is None
    assert tree.names(after) == tree.names(s)
    assert all(x.dtype == y.dtype and x.shape == y.shape for x, y in zip(*map(tree.leaves, (after, s)), strict=True))
    assert all(value.shape == () for value in metrics.values())
    assert set(metrics) >= {"critic_loss", "actor_loss", "entropy", "temperature"}


def test_bfloat16_is_close_to_float32() -> None:
    """Eight bits of mantissa: metrics of the first cycle within a few percent of their size."""
    found, metrics = learner(compute_dtype="bfloat16").cycle(state(), planted(), SCALE, 0)
    after, expected = learner().cycle(state(), planted(), SCALE, 0)
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value.item(), rel=0.05, abs=0.1), name
    assert {leaf.dtype for leaf in tree.leaves(found)} == {torch.float32, torch.int64}
    # A first Adam step is the learning rate whatever the gradient's size; a sign may differ.
    torch.testing.assert_close(found.critic.params, after.critic.params, rtol=0, atol=4e-3)
    assert moved(found, after) >= {"critic", "actor"}


def test_an_unset_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="lr_decay_updates=0"):
        cycle.make_learner(SACConfig(), SPEC)


def compare(backend: str, tolerance: float) -> None:
    """Compiles the whole cycle, actor included, as one graph and compares two calls with the eager run."""
    learn, buffer = learner(), planted()
    graph = capture.compiled(functools.partial(learn.cycle, phase=0), backend)
    found = expected = state()
    for _ in range(2):
        (found, metrics), (expected, reference) = graph(found, buffer, SCALE), learn.cycle(expected, buffer, SCALE, 0)
        torch.testing.assert_close(metrics, reference, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_compiled_equals_eager() -> None:
    """Eagerly a CPU runs the critics one by one, compiled by vmap, which may round differently: 1e-5."""
    compare("aot_eager", tolerance=1e-5)


@pytest.mark.slow
def test_generated_code_is_close_to_eager() -> None:
    """Inductor fuses and reorders: 1e-3 after two cycles."""
    compare("inductor", tolerance=1e-3)
