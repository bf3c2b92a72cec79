"""The ring of n-step rows against deques in plain Python."""

from __future__ import annotations

import collections
from typing import NamedTuple

import pytest
import torch
from equal import assert_bits_equal
from torch import Tensor

from functional_sac import cycle, replay, value
from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec
from functional_sac.replay import Fields, ReplayState
from functional_sac.transition import Observation, Transition
from functional_sl import keys, tree

COLUMNS = Fields(actor=2, critic=3, action=1)
GAMMA = 0.9


class Row(NamedTuple):
    observation: tuple[list, list]
    action: list
    reward: float
    flags: tuple[bool, bool]
    successor: tuple[list, list]


class Deques:
    """What the buffer is to hold: n steps wait in a deque, finished rows lie in a list that is written in turn."""

    def __init__(self, capacity: int, n_step: int) -> None:
        self.waiting: collections.deque[list[Row]] = collections.deque(maxlen=n_step)
        self.ring: list[Row] = []
        self.capacity, self.n_step, self.cursor = capacity, n_step, 0

    def insert(self, step: Transition) -> None:
        self.waiting.append([row(tree.index(step, i)) for i in range(len(step.reward))])
        if len(self.waiting) == self.n_step:
            for series in zip(*self.waiting, strict=True):
                self.write(self.fold(series))

    def fold(self, series: tuple[Row, ...]) -> Row:
        total, factor = 0.0, 1.0
        for step in series:
            total, factor, last = total + factor * step.reward, factor * GAMMA, step
            if any(step.flags):
                break
        return Row(series[0].observation, series[0].action, total, last.flags, last.successor)

    def write(self, new: Row) -> None:
        if len(self.ring) < self.capacity:
            self.ring.append(new)
        else:
            self.ring[self.cursor] = new
        self.cursor = (self.cursor + 1) % self.capacity


def row(step: Transition) -> Row:
    lists = tree.map(Tensor.tolist, step)
    flags = (lists.terminated, lists.truncated)
    return Row(tuple(lists.observation), lists.action, lists.reward, flags, tuple(lists.next_observation))


def steps(count: int, envs: int) -> list[Transition]:
    generator = torch.Generator().manual_seed(count + envs)

    def draw(*shape: int) -> Tensor:
        return torch.randn(envs, *shape, generator=generator)

    def one() -> Transition:
        coin = torch.rand(envs, generator=generator)
        return Transition(
            Observation(draw(2), draw(3)), draw(1), draw(), coin < 0.15, coin > 0.85, Observation(draw(2), draw(3))
        )

    return [one() for _ in range(count)]


def everything(state: ReplayState) -> Transition:
    return replay.gather(state, torch.arange(int(state.size)), COLUMNS)


@pytest.mark.parametrize("n_step", [1, 3, 5])
@pytest.mark.parametrize(("capacity", "envs"), [(17, 3), (5, 4), (4, 4), (100, 2)])
def test_against_deques(capacity: int, envs: int, n_step: int) -> None:
    """After every one of 20 steps, through the seam; folded rewards to 1e-6, all else to the bit."""
    state, reference = replay.init(COLUMNS, capacity, envs, n_step), Deques(capacity, n_step)
    address = state.rows.data_ptr()
    for step in steps(20, envs):
        state = replay.insert(state, step, COLUMNS, GAMMA)
        reference.insert(step)
        assert (int(state.size), int(state.cursor)) == (len(reference.ring), reference.cursor)
        found = [row(tree.index(everything(state), i)) for i in range(len(reference.ring))]
        for actual, expected in zip(found, reference.ring, strict=True):
            assert actual._replace(reward=0.0) == expected._replace(reward=0.0)
            assert actual.reward == pytest.approx(expected.reward, abs=1e-6)
    assert state.rows.data_ptr() == address
    assert state.steps == 20


def count(t: int, envs: int, **flags: bool) -> Transition:
    """Step t: observation 1000 env + t, reward t + 1."""
    start = 1000.0 * torch.arange(envs) + t
    here, there = (Observation(x[:, None].repeat(1, 2), x[:, None].repeat(1, 3)) for x in (start, start + 1))
    marks = [torch.full((envs,), flags.get(name, False)) for name in ("terminated", "truncated")]
    return Transition(here, torch.zeros(envs, 1), torch.full((envs,), t + 1.0), *marks, there)


def test_three_steps_by_hand() -> None:
    """1 + 0.9 * 2 + 0.81 * 3 = 5.23; an episode that ends after two steps gives 1 + 1.8 = 2.8."""
    state = replay.init(COLUMNS, 30, 3, n_step=3)
    for t in range(3):
        assert state.size == 0
        state = replay.insert(state, count(t, 3), COLUMNS, GAMMA)
    found = everything(state)
    torch.testing.assert_close(found.reward, torch.full((3,), 5.23))
    assert found.observation.actor[:, 0].tolist() == [0, 1000, 2000]
    assert found.next_observation.critic[:, 2].tolist() == [3, 1003, 2003]
    for end in ("terminated", "truncated"):
        state = replay.init(COLUMNS, 30, 3, n_step=3)
        for t in range(3):
            state = replay.insert(state, count(t, 3, **{end: t == 1}), COLUMNS, GAMMA)
        found = everything(state)
        torch.testing.assert_close(found.reward, torch.full((3,), 2.8))
        assert getattr(found, end).tolist() == [True] * 3
        assert found.next_observation.actor[:, 0].tolist() == [2, 1002, 2002]


def test_n_steps_bootstrap_with_gamma_to_the_n(monkeypatch: pytest.MonkeyPatch) -> None:
    discounts = []
    original = value.bellman_target

    def record(*args: Tensor, discount: float) -> Tensor:
        discounts.append(discount)
        return original(*args, discount=discount)

    monkeypatch.setattr(value, "bellman_target", record)
    config = SACConfig(
        gamma=GAMMA, n_step=3, batch_size=2, bins=3, actor_width=2, critic_width=2, num_blocks=1, lr_decay_updates=1
    )
    learner = cycle.make_learner(config, EnvSpec("count", 2, 3, 1, 5, 0.1))
    learner.update(learner.init(keys.key(0)), count(0, 2), torch.zeros(4, 1), torch.zeros(2, 1), False)
    assert discounts
    assert discounts == pytest.approx([0.729] * len(discounts))


@pytest.mark.parametrize("capacity", [7, 40, 1000])
def test_next_is_always_the_true_successor(capacity: int) -> None:
    """Episodes of 5 and an overfull ring: no row spans two episodes or the seam."""
    state = replay.init(COLUMNS, capacity, 2)
    for t in range(50):
        state = replay.insert(state, count(100 * (t // 5) + t % 5, 2, truncated=t % 5 == 4), COLUMNS, GAMMA)
    batch = replay.gather(state, replay.indices(state, keys.key(0), (10_000,)), COLUMNS)
    assert torch.equal(batch.next_observation.actor, batch.observation.actor + 1)
    assert torch.equal(batch.next_observation.critic, batch.observation.critic + 1)


@pytest.mark.parametrize("size", [1, 13, 64])
def test_indices_are_uniform_over_the_filled_rows(size: int) -> None:
    """Chi-square of 13 and 64 classes below the 99.99 % points of 12 and 63 degrees of freedom, 39.1 and 113."""
    state = replay.init(COLUMNS, 64, 1)._replace(size=torch.tensor(size))
    drawn = replay.indices(state, keys.key(7), (4, 200 * size))
    assert drawn.shape == (4, 200 * size)
    assert drawn.dtype == torch.int64
    observed = torch.bincount(drawn.reshape(-1), minlength=size).double()
    assert len(observed) == size
    assert ((observed - 800) ** 2 / 800).sum() < {1: 1e-9, 13: 39.1, 64: 113}[size]


@pytest.mark.parametrize(
    ("size", "cursor", "expected"),
    [(3, 3, [0, 1, 2]), (8, 8, [1, 2, 3, 4, 5, 6, 7]), (10, 4, [0, 1, 2, 3, 7, 8, 9]), (0, 0, [9])],
)
def test_reserved_rows_are_those_that_the_next_step_overwrites(size: int, cursor: int, expected: list[int]) -> None:
    """Ten rows, three environments: never more than the newest seven."""
    state = replay.init(COLUMNS, 10, 3)._replace(size=torch.tensor(size), cursor=torch.tensor(cursor % 10))
    found = set(replay.indices(state, keys.key(0), (500,), reserved=3).tolist())
    assert found == set(expected)


def test_indices_beyond_two_to_the_31() -> None:
    state = replay.init(COLUMNS, 4, 1)._replace(size=torch.tensor(3 * 2**30))
    drawn = replay.indices(state, keys.key(0), (1000,))
    assert 0 <= drawn.min() < 2**31 < drawn.max() < 3 * 2**30


def test_pack_and_unpack_are_inverses() -> None:
    step = steps(1, 4)[0]
    rows = replay.pack(step)
    assert rows.shape == (4, sum(COLUMNS.widths)) == (4, 14)
    assert_bits_equal(replay.unpack(rows, COLUMNS), step)


def test_only_the_rows_are_written_in_place() -> None:
    state = replay.init(COLUMNS, 8, 2, n_step=3)
    for step in steps(4, 2):
        before = tree.clone(state._replace(rows=torch.zeros(0)))
        new = replay.insert(state, step, COLUMNS, GAMMA)
        assert_bits_equal(state._replace(rows=torch.zeros(0)), before)
        assert tree.overlapping(new) is None
        state = new


@pytest.mark.parametrize("n_step", [1, 3])
def test_seeds_by_vmap_equal_single_runs(n_step: int) -> None:
    singles = [replay.init(COLUMNS, 7, 2, n_step) for _ in range(3)]
    stacked = tree.stack(singles)
    insert = torch.func.vmap(lambda state, step: replay.insert(state, step, COLUMNS, GAMMA))
    for each in zip(*(steps(6 + seed, 2)[:6] for seed in range(3)), strict=True):
        stacked = insert(stacked, tree.stack(list(each)))
        singles = [replay.insert(s, step, COLUMNS, GAMMA) for s, step in zip(singles, each, strict=True)]
    assert_bits_equal(stacked, tree.stack(singles))


def test_a_capacity_below_one_vector_step_is_refused() -> None:
    with pytest.raises(ValueError, match="replay_capacity=3 is below num_envs=4"):
        replay.init(COLUMNS, 3, 4)
