"""The replay's contents, in ring order, against the official buffer's after every step."""

from __future__ import annotations

import flashsac_official as oracle
import pytest
import torch

from functional_sac import replay
from functional_sac.replay import Fields
from functional_sac.transition import Transition, symmetric

COLUMNS = Fields(actor=4, critic=0, action=2)
MIN_ROWS = 10


@pytest.mark.parametrize("capacity", [64, 22])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("seed", oracle.SEEDS)
def test_contents(seed: int, n_step: int, capacity: int) -> None:
    """22 rows wrap in the middle of four environments."""
    steps = oracle.beneath(oracle.load(seed), "replay/in")
    recorded = oracle.beneath(oracle.load(seed), f"replay/n{n_step}_len{capacity}")
    state = replay.init(COLUMNS, capacity, num_envs=4, n_step=n_step)
    for step, history in enumerate(recorded["history_num_cur_cansample"].tolist()):
        one = {name: x[step] for name, x in steps.items()}
        transition = Transition(
            observation=symmetric(one["observation"]),
            action=one["action"],
            reward=one["reward"],
            terminated=one["terminated"] > 0.5,
            truncated=one["truncated"] > 0.5,
            next_observation=symmetric(one["next_observation"]),
        )
        state = replay.insert(state, transition, COLUMNS, gamma=0.97)
        assert [state.size.item(), state.cursor.item(), int(state.size >= MIN_ROWS)] == history

    size = state.size.item()
    found = replay.gather(state, torch.arange(size), COLUMNS)
    for name in ("action", "terminated", "truncated"):
        oracle.check(getattr(found, name), recorded[name], oracle.EXACT, name)
    # One step copies the reward; three steps sum three, in the official order but for a fused product.
    oracle.check(found.reward, recorded["reward"], oracle.EXACT if n_step == 1 else oracle.ARITHMETIC, "reward")
    for name in ("observation", "next_observation"):
        oracle.check(getattr(found, name).actor, recorded[name], oracle.EXACT, name)
    # An observation spells out (step, environment, kind, payload); kind 1 is an episode's last one.
    (start, env, *_), (successor, _, kind, _) = found.observation.actor.T, found.next_observation.actor.T
    meaning = {"start_step": start, "env": env, "next_step": successor, "next_is_final": kind == 1}
    oracle.check_all(meaning, {name: recorded[name] for name in meaning}, oracle.EXACT)
    if capacity == 64:  # nothing is overwritten: a row's place follows from where it starts
        assert torch.equal(start * 4 + env, torch.arange(float(size)))
