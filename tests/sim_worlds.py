"""Small states of a robot for the tests of both simulators."""

from __future__ import annotations

import torch

from functional_sl.sim.contract import SimState, Simulator


def scattered(sim: Simulator, num_worlds: int, seed: int = 0) -> SimState:
    """Returns worlds with bases in the air, at random tilts, angles and velocities."""
    g = torch.Generator().manual_seed(seed)
    state = sim.init(num_worlds)
    qpos, qvel = state.qpos.clone(), state.qvel.clone()
    qpos[:, 2] += 0.5
    tilt = torch.randn(num_worlds, 4, generator=g)
    qpos[:, 3:7] = tilt / tilt.norm(dim=1, keepdim=True)
    qpos[:, 7:] += 0.2 * torch.randn(qpos[:, 7:].shape, generator=g)
    qvel += torch.randn(qvel.shape, generator=g)
    return sim.reset(state, torch.ones(num_worlds, dtype=torch.bool), qpos, qvel)


def targets(sim: Simulator, num_worlds: int, seed: int = 1, spread: float = 0.2) -> torch.Tensor:
    """Returns target angles about the standing pose."""
    noise = torch.randn(num_worlds, len(sim.model.joint_names), generator=torch.Generator().manual_seed(seed))
    return sim.model.default_joint_pos + spread * noise
