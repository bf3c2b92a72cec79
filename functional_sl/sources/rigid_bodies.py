"""Falling and colliding rigid bodies, simulated in MuJoCo (extra `mujoco`): boxes, spheres, cylinders, convex bodies.

A scene has some of them over the ground z = 0, each of random shape, size, mass, friction and restitution, thrown at
the middle. An object is a cloud of points on its surface, in its own axes about its centre of mass; a frame of time
gives every object's place and orientation. Scenes differ in their numbers of objects and points and are padded.

MuJoCo has no coefficient of restitution. A contact is made a damped spring of 300 rad/s whose damping gives the wished
ratio of speeds in a head-on collision with the ground. Two objects' dampings are averaged; of two frictions the greater
counts, and the ground has almost none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.models import farthest_point
from functional_sl.run import files, identity
from functional_sl.sources import mujoco_worlds, rigid_shapes
from functional_sl.sources.rigid_shapes import KINDS, Shape

FORMAT, VERSION = "functional_sl.rigid_bodies", "1"
FRAME_DT = 1 / 120  # s
SUBSTEPS = 6
FEWEST_POINTS = 24  # of an object: a convex body has up to 20 corners
MOST_OBJECTS = 8
CONVENTIONS = {
    "frame_dt": FRAME_DT,
    "substeps": SUBSTEPS,
    "up_axis": "z",
    "gravity": -9.81,
    "ground": "z = 0",
    "position": "of the centre of mass, world axes, m",
    "quaternion": "wxyz, body axes to world axes",
    "points": "body axes about the centre of mass, m, in the order of farthest-point sampling",
    "properties": ["mass (kg)", "friction", "restitution"],
    "kinds": list(KINDS),
}
_STIFFNESS = 300.0  # rad/s of the undamped contact
_GREATEST = 20.0  # m from the middle; beyond it a trajectory ends
_SPACING = 0.6  # m between the middles of the four cells above which objects start


class Scenes(NamedTuple):
    """N scenes of at most F frames, O objects and P points; what is padded is zero, a quaternion (1, 0, 0, 0)."""

    positions: Tensor  # [N, F, O, 3] float32, m
    quaternions: Tensor  # [N, F, O, 4] float32, wxyz
    points: Tensor  # [N, O, P, 3] float32, m, the first ones spread over the shape
    point_mask: Tensor  # [N, O, P] bool
    objects: Tensor  # [N, O] bool
    properties: Tensor  # [N, O, 3] float32: mass in kg, friction, restitution
    kinds: Tensor  # [N, O] int64, of `KINDS`
    lengths: Tensor  # [N] int64, frames that count


class Ranges(NamedTuple):
    """What a scene is drawn from; both ends are drawn."""

    objects: tuple[int, int] = (2, 6)
    points: tuple[int, int] = (24, 64)
    frames: int = 180
    height: float = 0.5  # m, greatest gap below an object at the start
    throw: float = 2.0  # m/s, greatest speed to the middle and downwards
    spin: float = 5.0  # rad/s, greatest about every axis


def generate(key: Tensor, count: int, ranges: Ranges) -> Scenes:
    """Simulates scenes, the same ones from the same key and simulator.

    Args:
      key: [2].
      count: N.
      ranges: how many objects, points and frames.

    Raises:
      ValueError: as `check`, or without a scene.
      ImportError: if MuJoCo is not installed.
    """
    check(ranges)
    if count < 1:
        raise ValueError(f"{count} scenes: must be at least 1")
    most, greatest = ranges.objects[1], ranges.points[1]
    drawn = keys.uniform(keys.fold_in(key, 0), (count, most, 64), dtype=torch.float64).numpy()
    normal = keys.normal(keys.fold_in(key, 1), (count, most, greatest, 3), dtype=torch.float64).numpy()
    spread = keys.uniform(keys.fold_in(key, 2), (count, most, greatest, 4), dtype=torch.float64).numpy()
    scenes = [_scene(*numbers, ranges) for numbers in zip(drawn, normal, spread, strict=True)]
    stacked = {name: torch.from_numpy(np.stack([scene[name] for scene in scenes])) for name in Scenes._fields}
    return _ordered(Scenes(**{n: x.to(torch.float32) if x.is_floating_point() else x for n, x in stacked.items()}))


def check(ranges: Ranges) -> None:
    """Refuses what no scene can be drawn from.

    Raises:
      ValueError: names the first field that cannot be meant, its value and what may stand there.
    """
    for name, least, most in (("objects", 1, MOST_OBJECTS), ("points", FEWEST_POINTS, math.inf)):
        ends = getattr(ranges, name)
        if len(ends) != 2 or not least <= ends[0] <= ends[1] <= most:
            rule = f"from {least} to {most}" if most < math.inf else f"at least {least}"
            raise ValueError(f"{name}={ends}: must be the fewest and the most, {rule}")
    if ranges.frames < 3:
        raise ValueError(f"frames={ranges.frames}: must be at least 3")
    for name in ("height", "throw", "spin"):
        if not 0 <= getattr(ranges, name) < math.inf:
            raise ValueError(f"{name}={getattr(ranges, name)}: must be finite and not negative")


def write(path: str | Path, scenes: Scenes, drawn: Mapping[str, Any]) -> None:
    """Writes scenes as one safetensors file, whole or not at all.

    Args:
      path: the file.
      scenes: of this machine's simulator.
      drawn: JSON, how they were drawn: seed, stream, count and ranges.
    """
    about = conventions() | {"drawn": dict(drawn)}
    header = {
        "format": FORMAT,
        "version": VERSION,
        "about": identity.canonical(about, "about"),
        "digest": identity.digest([about, tree.digest(scenes)], "scenes"),
        "versions": identity.canonical(identity.versions(), "versions"),
    }
    files.write_whole(Path(path), safetensors.torch.save(tree.clone(scenes._asdict()), header))


def read(path: str | Path, drawn: Mapping[str, Any] | None = None) -> tuple[Scenes, dict[str, Any]]:
    """Returns the scenes of a file and what it tells of them: `CONVENTIONS`, `simulator` and `drawn`.

    Args:
      path: of `write`.
      drawn: how they must have been drawn; any way where there is none.

    Raises:
      ValueError: if the file is missing, damaged, of another format, other conventions or another draw.
    """
    path = Path(path)
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"its format is {header.get('format')!r} version {header.get('version')!r}")
        about, scenes = identity.parse(header["about"]), Scenes(**tensors)
        intact = identity.digest([about, tree.digest(scenes)], "scenes") == header["digest"]
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no complete file of rigid bodies: {error}; write it again") from None
    if not intact:
        raise ValueError(f"{path} is damaged: its content has another digest than when it was written; write it again")
    expected = CONVENTIONS | {"simulator": about.get("simulator")}
    expected = expected | {"drawn": about.get("drawn") if drawn is None else dict(drawn)}
    expected = identity.parse(identity.canonical(expected, "conventions"))
    if wrong := sorted(name for name in expected.keys() | about.keys() if about.get(name) != expected.get(name)):
        name = wrong[0]
        raise ValueError(f"{path}: {name!r} is {about.get(name)!r}, expected {expected.get(name)!r}")
    return scenes, about


def conventions() -> dict[str, Any]:
    """Returns what makes the numbers of a file readable, the version of the installed simulator included."""
    return CONVENTIONS | {"simulator": mujoco_worlds.version()}


def damping_ratio(restitution: float) -> float:
    """Returns the damping ratio of a linear contact without adhesion that bounces with `restitution`.

    The contact ends when its force would pull (Schwager and Poeschel, Granular Matter 9, 2007, eq. 21). Restitutions
    below 0.22 are not reached and get the ratio of 0.22.
    """
    ratio = np.linspace(0.02, 0.7, 500)
    root = np.sqrt(1 - ratio**2)
    bounce = np.exp(-ratio / root * (np.pi - np.arctan2(2 * ratio * root, root**2 - ratio**2)))
    return float(np.interp(restitution, bounce[::-1], ratio[::-1]))


def _scene(drawn: np.ndarray, normal: np.ndarray, spread: np.ndarray, ranges: Ranges) -> dict[str, np.ndarray]:
    """Returns one padded scene as arrays by field."""
    count, slots = _between(drawn[0, 0], ranges.objects), ranges.objects[1]
    shapes = [rigid_shapes.draw(drawn[i], normal[i]) for i in range(count)]
    properties = np.stack([_properties(drawn[i]) for i in range(count)])
    model, centres, faces = _model(shapes, properties)
    positions, quaternions, length = _simulate(model, _starts(shapes, drawn[:count], ranges), ranges.frames)
    points, mask = np.zeros((slots, ranges.points[1], 3)), np.zeros((slots, ranges.points[1]), bool)
    for i, shape in enumerate(shapes):
        wanted = _between(drawn[i, 1], ranges.points)
        points[i, :wanted] = rigid_shapes.cloud(shape, faces[i], wanted, spread[i]) - centres[i]
        mask[i, :wanted] = True
    unit = np.broadcast_to([1.0, 0.0, 0.0, 0.0], (ranges.frames, slots - count, 4))
    return {
        "positions": np.concatenate([positions, np.zeros((ranges.frames, slots - count, 3))], 1),
        "quaternions": np.concatenate([quaternions, unit], 1),
        "points": points,
        "point_mask": mask,
        "objects": np.arange(slots) < count,
        "properties": np.concatenate([properties, np.zeros((slots - count, 3))]),
        "kinds": np.array([KINDS.index(shape.kind) for shape in shapes] + [0] * (slots - count)),
        "lengths": np.array(length),
    }


def _between(u: float, ends: tuple[int, int]) -> int:
    return min(ends[0] + int(u * (ends[1] - ends[0] + 1)), ends[1])


def _properties(u: np.ndarray) -> np.ndarray:
    """Draws mass 0.2 to 3 kg (evenly in its logarithm), friction 0.1 to 0.9 and restitution 0.25 to 0.75."""
    return np.array([0.2 * 15 ** u[7], 0.1 + 0.8 * u[8], 0.25 + 0.5 * u[9]])


def _starts(shapes: list[Shape], u: np.ndarray, ranges: Ranges) -> np.ndarray:
    """Returns qpos and qvel [K, 13]: above four cells, thrown at the middle, turned and spinning at random."""
    heights, found = np.zeros(4), []
    for i, (shape, draw) in enumerate(zip(shapes, u, strict=True)):
        reach, cell = rigid_shapes.reach(shape), i % 4
        heights[cell] += reach + 0.02 + ranges.height * draw[10]
        centre = _SPACING * (np.array([cell % 2, cell // 2]) - 0.5)
        spot = np.array([*(centre + 0.02 * (2 * draw[11:13] - 1)), heights[cell]])
        heights[cell] += reach
        towards = -centre / np.linalg.norm(centre)
        velocity = ranges.throw * np.array([*(draw[13] * towards + 0.4 * (2 * draw[14:16] - 1)), 0.2 - 1.2 * draw[16]])
        turn = _quaternion(draw[17:20])
        found.append(np.concatenate([spot, turn, velocity, ranges.spin * (2 * draw[20:23] - 1)]))
    return np.stack(found)


def _quaternion(u: np.ndarray) -> np.ndarray:
    """Returns a random orientation wxyz, uniformly over all of them (Shoemake, 1992)."""
    a, b = math.sqrt(1 - u[0]), math.sqrt(u[0])
    return np.array(
        [
            a * math.sin(2 * math.pi * u[1]),
            a * math.cos(2 * math.pi * u[1]),
            b * math.sin(2 * math.pi * u[2]),
            b * math.cos(2 * math.pi * u[2]),
        ]
    )


def _model(shapes: list[Shape], properties: np.ndarray) -> tuple[Any, np.ndarray, list[np.ndarray]]:
    """Returns the `MjModel`, the centres of mass [K, 3] in body axes, and the triangles [T, 3, 3] of convex bodies."""
    mujoco = mujoco_worlds.require()
    spec = mujoco.MjSpec()
    spec.option.timestep = FRAME_DT / SUBSTEPS
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    solimp = [0.95, 0.99, 0.001, 0.5, 2.0]
    ground = {"size": [0.0, 0.0, 1.0], "friction": [0.01, 0.005, 0.0001], "solmix": 1e-8, "solimp": solimp}
    spec.worldbody.add_geom(name="ground", type=mujoco.mjtGeom.mjGEOM_PLANE, **ground)
    kinds = {"box": "mjGEOM_BOX", "sphere": "mjGEOM_SPHERE", "cylinder": "mjGEOM_CYLINDER", "convex": "mjGEOM_MESH"}
    for i, (shape, (mass, friction, restitution)) in enumerate(zip(shapes, properties, strict=True)):
        body = spec.worldbody.add_body(name=f"object_{i}")
        body.add_freejoint()
        ratio = damping_ratio(restitution)
        contact = {"friction": [friction, 0.005, 0.0001], "solref": [1 / (_STIFFNESS * ratio), ratio]}
        form = {"size": shape.size}
        if shape.kind == "convex":
            spec.add_mesh(name=f"mesh_{i}", uservert=shape.corners.flatten())
            form = {"meshname": f"mesh_{i}"}
        kind = getattr(mujoco.mjtGeom, kinds[shape.kind])
        body.add_geom(name=f"geom_{i}", type=kind, mass=mass, solimp=solimp, **contact, **form)
    model = spec.compile()
    return model, model.body_ipos[1:].copy(), [_triangles(model, i + 1) for i in range(len(shapes))]


def _triangles(model: Any, geom: int) -> np.ndarray:
    """Returns the triangles [T, 3, 3] of a geom's hull in body axes; none without a mesh."""
    mesh = model.geom_dataid[geom]
    if mesh < 0:
        return np.zeros((0, 3, 3))
    mujoco = mujoco_worlds.require()
    turn = np.zeros(9)
    mujoco.mju_quat2Mat(turn, model.geom_quat[geom])
    first, faces = model.mesh_vertadr[mesh], model.mesh_faceadr[mesh]
    corners = model.mesh_vert[first : first + model.mesh_vertnum[mesh]].astype(float)
    corners = corners @ turn.reshape(3, 3).T + model.geom_pos[geom]
    return corners[model.mesh_face[faces : faces + model.mesh_facenum[mesh]]]


def _simulate(model: Any, starts: np.ndarray, frames: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns places [F, K, 3] and orientations [F, K, 4], and how many frames count; the last of them repeats."""
    mujoco = mujoco_worlds.require()
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = starts[:, :7].flatten(), starts[:, 7:].flatten()
    mujoco.mj_forward(model, data)
    # Without a frame that counts all stay at the origin.
    positions = np.zeros((frames, len(starts), 3))
    quaternions = np.broadcast_to([1.0, 0.0, 0.0, 0.0], (frames, len(starts), 4)).copy()
    for frame in range(frames):
        mujoco.mj_kinematics(model, data)
        sound = np.isfinite(data.qpos).all() and np.abs(data.xipos).max() < _GREATEST
        if not sound or any(warning.number for warning in data.warning):
            last = max(frame - 1, 0)
            positions[frame:], quaternions[frame:] = positions[last], quaternions[last]
            return positions, quaternions, frame
        positions[frame], quaternions[frame] = data.xipos[1:], data.qpos.reshape(-1, 7)[:, 3:]
        mujoco.mj_step(model, data, SUBSTEPS)
    return positions, quaternions, frames


def _ordered(scenes: Scenes) -> Scenes:
    """Puts every cloud into the order of farthest-point sampling."""
    order = farthest_point.order(scenes.points, scenes.point_mask)
    points = scenes.points.gather(-2, order[..., None].expand(*order.shape, 3))
    return scenes._replace(points=points, point_mask=scenes.point_mask.gather(-1, order))
