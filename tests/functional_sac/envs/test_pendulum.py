"""The pendulum against float64 arithmetic and against the original."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from functional_sac.envs import pendulum
from functional_sl import keys


def test_each_step_follows_the_equations() -> None:
    env, generator = pendulum.pendulum(), torch.Generator().manual_seed(0)
    state, _ = env.init(keys.key(3), 4)
    # the third rod and the fourth start near the speed limit
    state = state._replace(physics=state.physics._replace(speed=torch.tensor([0.0, 1.0, 7.9, -7.9])))
    for action in 3.0 * torch.rand(100, 4, 1, generator=generator) - 1.5:
        angle, speed = (x.double().numpy() for x in state.physics)
        torque = 2.0 * np.clip(action[:, 0].double().numpy(), -1.0, 1.0)
        wrapped = np.arctan2(np.sin(angle), np.cos(angle))
        speed_next = np.clip(speed + 0.05 * (15.0 * np.sin(angle) + 3.0 * torque), -8.0, 8.0)
        angle_next = angle + 0.05 * speed_next
        state, timestep = env.step(state, action)
        # float32 carries about 1e-7 of angles up to a few turns and costs up to 17
        np.testing.assert_allclose(timestep.reward, -(wrapped**2 + 0.1 * speed**2 + 0.001 * torque**2), atol=2e-5)
        expected = np.stack((np.cos(angle_next), np.sin(angle_next), speed_next), axis=-1)
        np.testing.assert_allclose(timestep.final_observation.actor, expected, atol=1e-5)


def test_each_step_is_gymnasiums() -> None:
    generator = torch.Generator().manual_seed(0)
    gymnasium = pytest.importorskip("gymnasium")
    theirs = gymnasium.make("Pendulum-v1").unwrapped
    theirs.reset(seed=0)
    physics = pendulum.Pendulum(angle=torch.tensor([2.0]), speed=torch.tensor([-0.5]))
    for action in 2.0 * torch.rand(50, 1, 1, generator=generator) - 1.0:
        theirs.state = np.array([float(physics.angle), float(physics.speed)])
        observation, reward, terminated, *_ = theirs.step(2.0 * action[0].double().numpy())
        physics, ours, ended = pendulum.step(physics, action)
        np.testing.assert_allclose(pendulum.observe(physics).actor[0], observation, atol=1e-5)
        np.testing.assert_allclose(float(ours), reward, atol=2e-5)
        assert bool(ended) == terminated
