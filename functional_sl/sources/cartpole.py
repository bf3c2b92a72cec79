"""The cartpole's equations of motion in torch: data without a simulator, for all trajectories at once."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_sl.models.articulation import CARTPOLE, Robot
from functional_sl.models.nerd import wrap

GRAVITY = 9.81  # m/s^2


def acceleration(state: Tensor, force: Tensor) -> Tensor:
    """Returns (x'', theta'') of a pole hinged on a cart, without friction; Lagrange's equations solved for both.

    (M + m) x'' + m l cos(theta) theta'' = F + m l sin(theta) theta'^2
    m l cos(theta) x'' + J theta''       = tau + m g l sin(theta)

    theta is 0 upright and positive towards +x, l reaches from the hinge to the pole's centre of mass, and J is the
    moment about the hinge.

    Args:
      state: [N, 4] x, theta, x', theta'.
      force: [N, 2] F in N and tau in N m.
    """
    cart, pole = (body.rod for body in CARTPOLE.bodies)
    length = pole.centre[2]
    total, moment, inertia = cart.mass + pole.mass, pole.mass * length, pole.inertia[1] + pole.mass * length**2
    sine, coupling = torch.sin(state[:, 1]), moment * torch.cos(state[:, 1])
    push = force[:, 0] + moment * sine * state[:, 3].square()
    turn = force[:, 1] + moment * GRAVITY * sine
    determinant = total * inertia - coupling.square()
    return torch.stack([inertia * push - coupling * turn, total * turn - coupling * push], -1) / determinant[:, None]


def simulate(start: Tensor, actuation: Tensor, robot: Robot = CARTPOLE) -> Tensor:
    """Integrates with semi-implicit Euler, as MuJoCo's Euler does without damping.

    Args:
      start: [N, 4] float64.
      actuation: [N, T, 2], held over the substeps of each frame of time.
      robot: the cartpole, for its time step.

    Returns:
      [N, T + 1, 4] float64; angles in (-pi, pi].
    """
    dt, states = robot.frame_dt / robot.substeps, [start]
    state = start
    for force in actuation.unbind(1):
        for _ in range(robot.substeps):
            velocity = state[:, 2:] + dt * acceleration(state, force)
            state = torch.cat([state[:, :2] + dt * velocity, velocity], -1)
        states.append(state)
    trajectory = torch.stack(states, 1)
    return torch.cat([trajectory[..., :1], wrap(trajectory[..., 1:2]), trajectory[..., 2:]], -1)
