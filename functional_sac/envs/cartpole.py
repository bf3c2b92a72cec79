"""Cart and pole: swing the pole up and keep it there, or keep it up from the start.

A force-driven cart on a track carries a uniform pole on a free hinge. With theta = 0 upright and positive towards
+x, half length l and J = 4/3 m l^2 (the pole about its hinge), Lagrange's equations are (R. V. Florian, "Correct
equations for the dynamics of the cart-pole system", 2007, without friction in the bearings):

    (M + m) x'' + m l cos(theta) theta'' = F + m l sin(theta) theta'^2
    m l cos(theta) x'' + J theta''       = m g l sin(theta)

Masses, length, force, track and reward follow the cart-pole of the DeepMind Control Suite (Tassa et al., 2018).
The ends of the track are inelastic walls: the cart stops dead, and since the wall's impulse has no moment about
the hinge, the pole keeps its momentum m l cos(theta) x' + J theta'.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sac.envs import drawing
from functional_sac.envs.env import Env, EnvSpec, Task, autoreset
from functional_sac.transition import Observation, symmetric
from functional_sl import keys

GRAVITY = 9.81  # m/s^2
CART_MASS = 1.0  # kg
POLE_MASS = 0.1  # kg
HALF_LENGTH = 0.5  # m
MAX_FORCE = 10.0  # N
TRACK = 1.8  # m from the middle to a wall
LEAN = 0.5  # rad at which the balance task gives the pole up
DT = 0.01  # s
SUBSTEPS = 2

_MOMENT = POLE_MASS * HALF_LENGTH
_INERTIA = 4.0 / 3.0 * POLE_MASS * HALF_LENGTH**2


class Cartpole(NamedTuple):
    """The physics of N carts."""

    position: Tensor  # [N] float32, m
    angle: Tensor  # [N] float32, rad from upright, counted over full turns
    velocity: Tensor  # [N] float32, m/s
    angular_velocity: Tensor  # [N] float32, rad/s


def acceleration(physics: Cartpole, force: Tensor) -> tuple[Tensor, Tensor]:
    """Solves the equations above for (x'', theta''), each [N], under a force in newtons, [N]."""
    sine, coupling = torch.sin(physics.angle), _MOMENT * torch.cos(physics.angle)
    push = force + _MOMENT * sine * physics.angular_velocity.square()
    gravity = _MOMENT * GRAVITY * sine
    total = CART_MASS + POLE_MASS
    determinant = total * _INERTIA - coupling.square()
    return (_INERTIA * push - coupling * gravity) / determinant, (total * gravity - coupling * push) / determinant


def advance(physics: Cartpole, force: Tensor, dt: float = DT) -> Cartpole:
    """Moves by `dt` with semi-implicit Euler, then stops the carts that run into a wall."""
    linear, angular = acceleration(physics, force)
    velocity = physics.velocity + dt * linear
    angular_velocity = physics.angular_velocity + dt * angular
    free = physics.position + dt * velocity
    angle = physics.angle + dt * angular_velocity
    position = free.clamp(-TRACK, TRACK)
    lost = torch.where((position - free) * velocity < 0.0, velocity, 0.0)
    return Cartpole(
        position=position,
        angle=angle,
        velocity=velocity - lost,
        angular_velocity=angular_velocity + _MOMENT / _INERTIA * torch.cos(angle) * lost,
    )


def reward(physics: Cartpole, action: Tensor) -> Tensor:
    """Returns the suite's smooth reward in [0, 1]: upright * centred * small control * small velocity, [N].

    Each factor but the first has a floor, so that standing upright pays even far from the middle.
    """
    upright = (1.0 + torch.cos(physics.angle)) / 2.0
    centred = (1.0 + _bump(physics.position, 2.0)) / 2.0
    small_control = (5.0 - action.square()) / 5.0
    small_velocity = (1.0 + _bump(physics.angular_velocity, 5.0)) / 2.0
    return upright * centred * small_control * small_velocity


def _bump(x: Tensor, margin: float) -> Tensor:
    """A Gaussian of height 1 that falls to 0.1 at `margin`."""
    return torch.exp(x.square() * (math.log(0.1) / margin**2))


def observe(physics: Cartpole) -> Observation:
    """Returns (position, cos angle, sin angle, velocity, angular velocity)."""
    position, angle, velocity, angular_velocity = physics
    return symmetric(torch.stack((position, torch.cos(angle), torch.sin(angle), velocity, angular_velocity), dim=-1))


def render(physics: Cartpole) -> np.ndarray:
    """Draws the track with its walls, the cart and the pole."""
    extent = 2.2
    x, angle = float(physics.position), float(physics.angle)
    tip = (x + 2.0 * HALF_LENGTH * math.sin(angle), 2.0 * HALF_LENGTH * math.cos(angle))
    image = drawing.box(drawing.blank(), (0.0, 0.0), (TRACK + 0.2, 0.015), drawing.GREY, extent)
    for wall in (-TRACK - 0.24, TRACK + 0.24):
        image = drawing.box(image, (wall, 0.0), (0.04, 0.2), drawing.GREY, extent)
    image = drawing.box(image, (x, 0.0), (0.2, 0.12), drawing.BLUE, extent)
    image = drawing.capsule(image, (x, 0.0), tip, 0.045, drawing.ORANGE, extent)
    return drawing.capsule(image, (x, 0.0), (x, 0.0), 0.03, drawing.DARK, extent)


def _start(key: Tensor, angle: float) -> Cartpole:
    noise = keys.uniform(key, (4,), -0.05, 0.05)
    position, tilt, velocity, angular_velocity = noise.unbind(-1)
    return Cartpole(position, angle + tilt, velocity, angular_velocity)


def _step(physics: Cartpole, action: Tensor, fallible: bool) -> tuple[Cartpole, Tensor, Tensor]:
    action = action[:, 0]
    force = MAX_FORCE * action
    for _ in range(SUBSTEPS):
        physics = advance(physics, force)
    if fallible:
        terminated = (physics.angle.abs() > LEAN) | (physics.position.abs() >= TRACK)
    else:
        terminated = torch.zeros_like(physics.angle, dtype=torch.bool)
    return physics, reward(physics, action), terminated


def _make(task: str, angle: float, fallible: bool, solved_return: float) -> Env:
    spec = EnvSpec(
        task=task,
        actor_dim=5,
        critic_dim=0,
        action_dim=1,
        max_episode_steps=500,
        control_dt=SUBSTEPS * DT,
        solved_return=solved_return,
    )

    def reset(key: Tensor) -> Cartpole:
        return _start(key, angle)

    def step(physics: Cartpole, action: Tensor) -> tuple[Cartpole, Tensor, Tensor]:
        return _step(physics, action, fallible)

    return autoreset(Task(spec, reset, step, observe, render))


def cartpole_swingup() -> Env:
    """Returns the task that starts with the pole hanging: 500 steps, never terminates, return in [0, 500]."""
    return _make("cartpole_swingup", angle=math.pi, fallible=False, solved_return=400.0)


def cartpole_balance() -> Env:
    """Returns the task that starts upright and terminates where the pole leans beyond `LEAN` or the cart hits a wall.

    500 steps, return in [0, 500].
    """
    return _make("cartpole_balance", angle=0.0, fallible=True, solved_return=450.0)
