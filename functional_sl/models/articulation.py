"""Articulated robots as static tables, with forward kinematics and ground contact points in torch.

State layout of a robot with J joints, each of one degree of freedom:

    fixed base      joint positions J | joint velocities J
    floating base   position 3 | quaternion xyzw 4 | joint positions J | angular 3 | linear 3 | joint velocities J

Positions are in metres and radians. The base twist is spatial: the angular velocity in world axes, and the linear
velocity of that point of the base which passes through the world's origin. z points up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Vector = tuple[float, float, float]


class Joint(NamedTuple):
    """One degree of freedom at the origin of a body's frame, along one of the body's axes."""

    name: str
    kind: str  # slide or hinge
    axis: Vector
    limits: tuple[float, float] | None = None  # m or rad; a hinge without limits counts modulo a full turn
    effort: float = 0.0  # N or N m, the greatest actuation; 0 for a passive joint
    armature: float = 0.0  # kg or kg m^2
    damping: float = 0.0  # N s/m or N m s

    @property
    def continuous(self) -> bool:
        """Whether the position is an angle modulo a full turn."""
        return self.kind == "hinge" and self.limits is None


class Geom(NamedTuple):
    """A sphere (without `end`) or a capsule of uniform density, which meets the ground alone."""

    name: str
    radius: float  # m
    mass: float  # kg
    start: Vector = (0.0, 0.0, 0.0)
    end: Vector | None = None

    @property
    def centres(self) -> tuple[Vector, ...]:
        """The centres of the spheres that can touch a plane: one contact slot each."""
        return (self.start,) if self.end is None else (self.start, self.end)


class Rod(NamedTuple):
    """A body's mass without a shape: centre of mass and principal moments about it in the body's axes."""

    mass: float  # kg
    centre: Vector
    inertia: Vector  # kg m^2


class Body(NamedTuple):
    """A link; its frame is parallel to its parent's where its joint is at zero."""

    name: str
    parent: int  # index of an earlier body; -1 for the world, or for the free base itself
    position: Vector
    joint: Joint | None = None
    geoms: tuple[Geom, ...] = ()
    rod: Rod | None = None


class Robot(NamedTuple):
    """A robot and the time step of its data."""

    name: str
    bodies: tuple[Body, ...]
    floating: bool = False
    ground: bool = False  # whether it meets a plane
    travel: tuple[int, ...] = ()  # joints that move the whole robot where nothing else depends on the place
    frame_dt: float = 1 / 60  # s
    substeps: int = 5

    @property
    def joints(self) -> tuple[Joint, ...]:
        """The joints in the order of the state."""
        return tuple(body.joint for body in self.bodies if body.joint)

    @property
    def slots(self) -> tuple[tuple[int, Geom, Vector], ...]:
        """(body, shape, centre in the body's frame) of every contact slot, in order; none without a ground."""
        pairs = [(i, geom) for i, body in enumerate(self.bodies) for geom in body.geoms] if self.ground else []
        return tuple((i, geom, centre) for i, geom in pairs for centre in geom.centres)

    @property
    def state_size(self) -> int:
        """Numbers in a state."""
        return 2 * len(self.joints) + (13 if self.floating else 0)


class Contacts(NamedTuple):
    """The ground below every slot."""

    normals: Tensor  # [..., C, 3]
    points: Tensor  # [..., C, 3] the sphere's centre projected onto the ground
    depths: Tensor  # [..., C] distance of the surfaces; negative where they overlap


def poses(robot: Robot, state: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the position [..., 3] and rotation matrix [..., 3, 3] of every body for a state [..., S]."""
    base = 7 if robot.floating else 0
    angles = iter(state[..., base : base + len(robot.joints)].unbind(-1))
    positions, rotations = [], []
    for body in robot.bodies:
        if body.parent < 0:
            position, rotation = _root(robot, body, state)
        else:
            parent = rotations[body.parent]
            position, rotation = positions[body.parent] + parent @ state.new_tensor(body.position), parent
        if body.joint:
            position, rotation = _move(body.joint, next(angles), position, rotation)
        positions.append(position)
        rotations.append(rotation)
    return positions, rotations


def ground_contacts(robot: Robot, state: Tensor, normal: Tensor, offset: Tensor) -> Contacts:
    """Returns where every slot's sphere stands over the plane {x : normal . x = offset}.

    Args:
      robot: one that meets a ground.
      state: [..., S].
      normal: [..., 3] unit vector out of the ground.
      offset: [...] m.
    """
    positions, rotations = poses(robot, state)
    centres = torch.stack([positions[i] + rotations[i] @ state.new_tensor(c) for i, _, c in robot.slots], -2)
    normals = normal[..., None, :].expand_as(centres)
    height = (normals * centres).sum(-1) - offset[..., None]
    return Contacts(normals, centres - height[..., None] * normals, height - thickness(robot, state))


def thickness(robot: Robot, like: Tensor) -> Tensor:
    """Returns the radius of every slot's sphere, [C] m, in the type and on the device of `like`."""
    return like.new_tensor([geom.radius for _, geom, _ in robot.slots])


def rotation(quaternion: Tensor) -> Tensor:
    """Returns the matrix [..., 3, 3] of a unit quaternion xyzw [..., 4]."""
    x, y, z, w = quaternion.unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        (2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        (2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _root(robot: Robot, body: Body, state: Tensor) -> tuple[Tensor, Tensor]:
    if robot.floating:
        return state[..., :3], rotation(state[..., 3:7])
    shape = state.shape[:-1]
    return state.new_tensor(body.position).expand(*shape, 3), torch.eye(3).to(state).expand(*shape, 3, 3)


def _move(joint: Joint, at: Tensor, position: Tensor, rotation_: Tensor) -> tuple[Tensor, Tensor]:
    axis = at.new_tensor(joint.axis) / math.hypot(*joint.axis)
    if joint.kind == "slide":
        return position + at[..., None] * (rotation_ @ axis), rotation_
    half = at[..., None] / 2
    turn = torch.cat([axis * torch.sin(half), torch.cos(half)], -1)
    return position, rotation_ @ rotation(turn)


def _pole() -> Body:
    moment = 2.5 / 12  # of a thin rod of 1 m
    rod = Rod(2.5, (0.0, 0.0, 0.5), (moment, moment, 1e-3))
    return Body("pole", 0, (0.0, 0.0, 0.0), Joint("pole", "hinge", (0.0, 1.0, 0.0)), rod=rod)


CARTPOLE = Robot(
    "cartpole",
    (
        Body(
            "cart",
            -1,
            (0.0, 0.0, 0.0),
            Joint("cart", "slide", (1.0, 0.0, 0.0), effort=1500.0),
            rod=Rod(50.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        ),
        _pole(),
    ),
    travel=(0,),
)


def _link(name: str, parent: int, position: Vector) -> Body:
    joint = Joint(name, "hinge", (0.0, 1.0, 0.0), effort=1500.0)
    return Body(name, parent, position, joint, (Geom(name, 0.1, 80.0, (0.0, 0.0, 0.0), (0.0, 0.0, -1.0)),))


DOUBLE_PENDULUM = Robot(
    "double_pendulum", (_link("upper", -1, (0.0, 0.0, 0.0)), _link("lower", 0, (0.0, 0.0, -1.0))), ground=True
)


def _leg(name: str, index: int, x: float, y: float) -> tuple[Body, Body, Body]:
    """A rigid stub on the torso, an upper leg turning about z and a lower leg; `index` is the stub's."""
    out, motor = (x, y, 0.0), {"effort": 400.0, "armature": 0.05, "damping": 1.0}
    degree = math.pi / 180
    hip = Joint(f"{name}_hip", "hinge", (0.0, 0.0, 1.0), (-40 * degree, 40 * degree), **motor)
    # About this horizontal axis a positive angle lowers the foot.
    knee = Joint(f"{name}_knee", "hinge", (-y, x, 0.0), (30 * degree, 100 * degree), **motor)
    return (
        Body(f"{name}_stub", 0, (0.0, 0.0, 0.0), None, (Geom(f"{name}_stub", 0.08, 7.8, end=out),)),
        Body(f"{name}_upper", index, out, hip, (Geom(f"{name}_upper", 0.08, 7.8, end=out),)),
        Body(f"{name}_lower", index + 1, out, knee, (Geom(f"{name}_lower", 0.08, 13.5, end=(2 * x, 2 * y, 0.0)),)),
    )


def _ant() -> Robot:
    bodies = [Body("torso", -1, (0.0, 0.0, 0.0), None, (Geom("torso", 0.25, 65.4),))]
    for name, x, y in (("front_left", 1, 1), ("back_left", -1, 1), ("back_right", -1, -1), ("front_right", 1, -1)):
        bodies += _leg(name, len(bodies), 0.2 * x, 0.2 * y)
    return Robot("ant", tuple(bodies), floating=True, ground=True, substeps=16)


ANT = _ant()
ROBOTS = {robot.name: robot for robot in (CARTPOLE, DOUBLE_PENDULUM, ANT)}
