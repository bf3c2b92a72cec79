"""Trajectories of robots under random actuation: training data of Neural Robot Dynamics (arXiv:2508.15755).

A trajectory starts in a random state, and every actuated joint draws a new effort for every frame of time; in passive
motion there is none. A robot with a ground has one plane a trajectory. Trajectories that are not finite or leave
+-1e5 are dropped. What is generated depends on the key alone, and can be kept as a file of episodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import keys
from functional_sl.models.articulation import ROBOTS, Robot, ground_contacts
from functional_sl.models.nerd import multiply
from functional_sl.sources import cartpole, episodes, mujoco_worlds
from functional_sl.sources.episodes import Episodes, Feature, Schema

SOURCES = ("analytic", "mujoco")
STARTS = ("wide", "slow")
_GREATEST = 1e5
_CANDIDATES = 16  # starts of which the first one clear of the ground is taken
_DEGREE = math.pi / 180


class Trajectories(NamedTuple):
    """N trajectories of T steps."""

    states: Tensor  # [N, T + 1, S] float64
    actuation: Tensor  # [N, T, J] float64, N or N m
    normals: Tensor  # [N, 3] float64, unit normal of the ground
    offsets: Tensor  # [N] float64, m: the ground is {x : normal . x = offset}


def generate(
    robot: Robot, source: str, key: Tensor, count: int, steps: int, *, effort: float = 1.0, start: str = "wide"
) -> Trajectories:
    """Simulates trajectories.

    Args:
      robot: of `functional_sl.models.articulation`.
      source: `mujoco`, or `analytic` for the cartpole: its equations of motion in torch.
      key: [2].
      count: N before the drop of what is not finite.
      steps: T.
      effort: share of every joint's greatest effort that is drawn from; 0 for passive motion.
      start: `wide`, or `slow`: the cartpole within 1 m, 1 m/s and 1 rad/s instead of 3.5 m, 10 m/s and 10 rad/s.

    Raises:
      ValueError: for another source, or if nothing is left.
      ImportError: if MuJoCo is asked for and not installed.
    """
    if source not in SOURCES or (source == "analytic" and robot.name != "cartpole"):
        raise ValueError(
            f"source={source!r}: {robot.name} comes from mujoco{', or analytic' * (robot.name == 'cartpole')}"
        )
    start_key, torque_key, plane_key = keys.split(key, 3)
    normals, offsets = _planes(robot, plane_key, count)
    first = _starts(robot, start_key, normals, offsets, start)
    greatest = torch.tensor([effort * joint.effort for joint in robot.joints], dtype=torch.float64)
    actuation = greatest * _symmetric(torque_key, (count, steps, len(greatest)))
    if source == "analytic":
        states = cartpole.simulate(first, actuation, robot)
    else:
        states = mujoco_worlds.simulate(robot, first, actuation, normals, offsets)
    kept = (states.abs() <= _GREATEST).flatten(1).all(1)  # false for NaN
    if not bool(kept.any()):
        raise ValueError(f"{robot.name}: none of {count} trajectories of {steps} steps is finite; ask for more")
    return Trajectories(*(x[kept] for x in (states, actuation, normals, offsets)))


def simulator(source: str) -> str:
    """Returns what integrated the motion, with its version, as the schema of data records it."""
    return mujoco_worlds.version() if source == "mujoco" else "analytic 1"


def channels(robot: Robot) -> list[tuple[str, str]]:
    """Returns name and unit of every state channel, in order."""
    units = ["m" if joint.kind == "slide" else "rad" for joint in robot.joints]
    joints = [(joint.name, unit) for joint, unit in zip(robot.joints, units, strict=True)]
    rates = [(f"{name}_velocity", f"{unit}/s") for name, unit in joints]
    if not robot.floating:
        return joints + rates
    pose = [(f"base_{axis}", "m") for axis in "xyz"] + [(f"base_q{axis}", "") for axis in "xyzw"]
    twist = [(f"base_angular_{axis}", "rad/s") for axis in "xyz"] + [(f"base_linear_{axis}", "m/s") for axis in "xyz"]
    return pose + joints + twist + rates


def conventions(robot: Robot, simulator: str) -> dict[str, Any]:
    """Returns what the numbers of a robot's states mean and which simulator made them, as JSON."""
    return {
        "robot": robot.name,
        "simulator": simulator,
        "frame_dt": robot.frame_dt,
        "substeps": robot.substeps,
        "up_axis": "z",
        "gravity_dir": [0.0, 0.0, -1.0],
        "gravity": cartpole.GRAVITY,
        "quaternion": "xyzw",
        "twist": "spatial, angular first; the linear part is that of the base's point at the world's origin",
        "joints": [
            joint._asdict()
            | {"axis": list(joint.axis), "limits": list(joint.limits or ()), "continuous": joint.continuous}
            for joint in robot.joints
        ],
        "bodies": [
            {"name": body.name, "parent": body.parent, "position": list(body.position)}
            | ({"joint": body.joint.name} if body.joint else {})
            for body in robot.bodies
        ],
        "slots": [
            {"body": robot.bodies[i].name, "shape": geom.name, "centre": list(centre), "thickness": geom.radius}
            for i, geom, centre in robot.slots
        ],
    }


def to_episodes(robot: Robot, source: str, data: Trajectories, drawn: Mapping[str, Any]) -> Episodes:
    """Returns trajectories as episodes, one frame a step, with the state before and after it.

    Args:
      robot: whose trajectories they are.
      source: of them.
      data: the trajectories.
      drawn: JSON, how they were drawn: seed, count and so on.
    """
    count, steps = data.actuation.shape[:2]
    names, units = tuple(channels(robot)), [(j.name, "N" if j.kind == "slide" else "N m") for j in robot.joints]
    axes = tuple((axis, "") for axis in "xyz")
    features = (
        Feature("states", (len(names),), "float64", names),
        Feature("joint_acts", (len(units),), "float64", tuple(units)),
        Feature("next_states", (len(names),), "float64", names),
        Feature("ground_normal", (3,), "float64", axes),
        Feature("ground_offset", (1,), "float64", (("offset", "m"),)),
    )
    values = {
        "states": data.states[:, :-1].flatten(0, 1),
        "joint_acts": data.actuation.flatten(0, 1),
        "next_states": data.states[:, 1:].flatten(0, 1),
        "ground_normal": data.normals.repeat_interleave(steps, 0),
        "ground_offset": data.offsets.repeat_interleave(steps)[:, None],
    }
    schema = Schema(features, robot.frame_dt, "", conventions(robot, simulator(source)) | {"drawn": dict(drawn)})
    ends = torch.zeros(count, dtype=torch.bool)
    return Episodes(schema, values, torch.full((count,), steps), ends)


def from_episodes(recorded: Episodes, robot: Robot, drawn: Mapping[str, Any], where: str) -> Trajectories:
    """Returns the trajectories of a file of one robot, drawn in one way.

    Raises:
      ValueError: for another robot, other conventions or another draw; names `where`.
    """
    about = recorded.schema.about
    expected = conventions(robot, about.get("simulator", "")) | {"drawn": dict(drawn)}
    if wrong := sorted(key for key in expected.keys() | about.keys() if about.get(key) != expected.get(key)):
        raise ValueError(f"{where}: {wrong[0]!r} is {about.get(wrong[0])!r}, expected {expected.get(wrong[0])!r}")
    by_frame = {name: x.unflatten(0, (len(recorded.lengths), -1)) for name, x in recorded.values.items()}
    states = torch.cat([by_frame["states"], by_frame["next_states"][:, -1:]], 1)
    return Trajectories(
        states, by_frame["joint_acts"], by_frame["ground_normal"][:, 0], by_frame["ground_offset"][:, 0, 0]
    )


def write(path: str | Path, robot: Robot, source: str, data: Trajectories, drawn: Mapping[str, Any]) -> None:
    """Writes trajectories as a file of episodes; the arguments are those of `to_episodes`."""
    episodes.write(path, to_episodes(robot, source, data, drawn))


def read(path: str | Path, robot: Robot, drawn: Mapping[str, Any]) -> tuple[Trajectories, str]:
    """Returns the trajectories of a file and the simulator that it names.

    Raises:
      ValueError: if the file is damaged, of another robot, of other conventions or drawn in another way.
    """
    recorded = episodes.read(path)
    return from_episodes(recorded, robot, drawn, str(path)), recorded.schema.about["simulator"]


def _planes(robot: Robot, key: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The double pendulum's ground is tilted by up to 60 degrees and 0.4 to 2.2 m below the pivot; else z = 0."""
    level = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    if robot.floating or not robot.ground:
        return level.repeat(count, 1), torch.zeros(count, dtype=torch.float64)
    tilt, azimuth, distance = keys.uniform(key, (count, 3), dtype=torch.float64).unbind(-1)
    tilt, azimuth = 60 * _DEGREE * tilt, 2 * math.pi * azimuth
    normals = (torch.sin(tilt) * torch.cos(azimuth), torch.sin(tilt) * torch.sin(azimuth), torch.cos(tilt))
    return torch.stack(normals, -1), -(0.4 + 1.8 * distance)


def _starts(robot: Robot, key: Tensor, normals: Tensor, offsets: Tensor, start: str) -> Tensor:
    count = len(normals)
    if robot.name == "cartpole":
        widest = (1.0, math.pi, 1.0, 1.0) if start == "slow" else (3.5, math.pi, 10.0, 10.0)
        return torch.tensor(widest, dtype=torch.float64) * _symmetric(key, (count, 4))
    if robot.floating:
        return _ant_starts(key, count)
    widest = torch.tensor((math.pi, math.pi, 2 * math.pi, 4 * math.pi), dtype=torch.float64)
    drawn = widest * _symmetric(key, (count, _CANDIDATES, 4))
    depths = ground_contacts(robot, drawn, normals[:, None], offsets[:, None]).depths
    # The first candidate above the ground; where none is, the highest of all.
    clear = depths.amin(-1)
    best = torch.where(clear > 0, torch.arange(_CANDIDATES, 0, -1), clear.clamp(-1e3, 0)).argmax(1)
    return drawn[torch.arange(count), best]


def _ant_starts(key: Tensor, count: int) -> Tensor:
    """Height 1 to 1.3 m, any heading, tilted by up to 0.3 rad, and every joint within its limits."""
    place, joints, rates, base = keys.split(key, 4)
    height, heading, tilt, azimuth = keys.uniform(place, (count, 4), dtype=torch.float64).unbind(-1)
    heading, tilt, azimuth = math.pi * heading, 0.15 * tilt, 2 * math.pi * azimuth  # half angles, and the tilt's axis
    zero = torch.zeros_like(heading)
    turn = torch.stack([zero, zero, torch.sin(heading), torch.cos(heading)], -1)
    lean = torch.stack(
        [torch.sin(tilt) * torch.cos(azimuth), torch.sin(tilt) * torch.sin(azimuth), zero, torch.cos(tilt)], -1
    )
    position = torch.stack([zero, zero, 1 + 0.3 * height], -1)
    low, high = torch.tensor([joint.limits for joint in ROBOTS["ant"].joints], dtype=torch.float64).unbind(-1)
    angles = low + (high - low) * keys.uniform(joints, (count, 8), dtype=torch.float64)
    angular, linear = _symmetric(base, (count, 2, 3)).unbind(1)
    # The velocity is drawn at the base and moved to the world's origin, as the layout has it.
    angular = math.pi * angular
    linear = linear + torch.linalg.cross(position, angular)
    velocity = 2 * math.pi * _symmetric(rates, (count, 8))
    return torch.cat([position, multiply(lean, turn), angles, angular, linear, velocity], -1)


def _symmetric(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    return keys.uniform(key, shape, -1.0, 1.0, torch.float64)
