"""Reading and writing clips of the G1 in the layouts that others use.

    .csv: position 3, quaternion (x, y, z, w), joints; 30 fps                      Unitree's retargeted LAFAN1
    .npz: qpos or joint_pos [T, 7 + J] with quaternion (w, x, y, z); fps
    .npz: joint_pos [T, J], body_pos_w [T, B, 3], body_quat_w [T, B, 4]; fps        BeyondMimic

Only positions are read. Of the bodies only the base is used: it is found by the file's `body_names`, or as the first
body that is not the world. Joints are placed by the file's `joint_names`. Without these they are in the model's order,
or, if that puts the bodies of a BeyondMimic file where the file has them, in the breadth-first one of Isaac Lab.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from functional_sl.motions import clip as clips
from functional_sl.motions.clip import MotionClip
from functional_sl.run import files
from functional_sl.sim.robots import g1
from functional_sl.sim.robots import robot as robots
from functional_sl.sim.robots.robot import Robot

Array = NDArray[np.float64]

SUFFIXES = (".csv", ".npz")
LAFAN_FPS = 30.0
# How far a body may lie from where the file has it, on average; models of one robot differ by about 1 cm.
_SAME_PLACE = 0.05
_PROBED_FRAMES = 20


def load(path: str | Path, fps: float | None = None, robot: Robot | None = None) -> MotionClip:
    """Reads a clip at its own frame rate.

    Args:
      path: a .csv or .npz file in one of the layouts above.
      fps: frame rate; needed where an .npz file holds none, and goes before what the file says.
      robot: whose motion it is; a G1 if left out.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, what is wrong with it and what to do.
    """
    path, robot = Path(path), g1.robot() if robot is None else robot
    if path.suffix not in SUFFIXES:
        raise ValueError(f"motion {path}: expected a .csv or .npz file")
    if not path.is_file():
        raise FileNotFoundError(f"motion {path} does not exist")
    qpos, found = _csv(path) if path.suffix == ".csv" else _npz(path, robot)
    fps = found if fps is None else fps
    if fps is None:
        raise ValueError(f"motion {path}: the file holds no fps; give the frame rate of the recording, such as fps=30")
    return clips.make(torch.from_numpy(qpos), fps, str(path), len(robot.joint_names))._replace(name=path.stem)


def save(path: str | Path, clip: MotionClip, robot: Robot | None = None) -> None:
    """Writes a clip as a BeyondMimic .npz file, with velocities, all bodies, and the names of joints and bodies.

    Raises:
      ValueError: if the path does not end in .npz, or the clip is not of the robot.
    """
    path, robot = Path(path), g1.robot() if robot is None else robot
    if path.suffix != ".npz":
        raise ValueError(f"motion {path}: expected a path that ends in .npz")
    found = clips.kinematics(clip, robot)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        fps=np.float64(clip.fps),
        joint_names=np.array(robot.joint_names),
        body_names=np.array(robot.body_names),
        joint_pos=clip.joint_pos.numpy(),
        joint_vel=found.qvel[:, clips.BASE - 1 :].numpy(),
        body_pos_w=found.body_pos.numpy(),
        body_quat_w=found.body_quat.numpy(),
        body_lin_vel_w=found.body_lin_vel.numpy(),
        body_ang_vel_w=found.body_ang_vel.numpy(),
    )
    files.write_whole(path, buffer.getvalue())


def _csv(path: Path) -> tuple[Array, float]:
    try:
        columns = np.loadtxt(path, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"motion {path}: not a table of numbers separated by commas ({error})") from error
    # (x, y, z, w) becomes (w, x, y, z); `clips.make` judges another number of columns.
    order = [0, 1, 2, 6, 3, 4, 5, *range(7, columns.shape[1])]
    return (columns[:, order] if columns.shape[1] >= clips.BASE else columns), LAFAN_FPS


def _npz(path: Path, robot: Robot) -> tuple[Array, float | None]:
    held = _arrays(path)
    fps = float(held["fps"].reshape(-1)[0]) if held.get("fps", np.zeros(0)).size else None
    joints = held.get("qpos", held.get("joint_pos"))
    if joints is None:
        raise ValueError(f"motion {path}: no array qpos or joint_pos, only {', '.join(sorted(held)) or 'nothing'}")
    width = clips.BASE + len(robot.joint_names)
    if joints.ndim == 2 and joints.shape[1] == width:
        # Without names the joints are in the model's order.
        order = _orders(path, held, robot)[0]
        return joints[:, [*range(clips.BASE), *(clips.BASE + i for i in order)]].astype(np.float64), fps
    if "qpos" in held or joints.ndim != 2:
        return joints.astype(np.float64), fps  # `clips.make` tells what is wrong
    if joints.shape[1] != len(robot.joint_names):
        raise ValueError(
            f"motion {path}: joint_pos has {joints.shape[1]} columns; the {robot.name} has {len(robot.joint_names)} "
            f"joints, or {width} columns with the base before them"
        )
    return _with_base(path, held, robot), fps


def _arrays(path: Path) -> dict[str, NDArray]:
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"motion {path}: cannot be read as an .npz file of plain arrays ({error})") from error


def _with_base(path: Path, held: dict[str, NDArray], robot: Robot) -> Array:
    """Returns qpos out of joints and bodies."""
    joints = held["joint_pos"].astype(np.float64)
    for name, width in (("body_pos_w", 3), ("body_quat_w", 4)):
        shape = held[name].shape if name in held else ()
        if len(shape) != 3 or shape[0] != len(joints) or shape[2] != width or shape[1] == 0:
            raise ValueError(
                f"motion {path}: the base is read from {name} [{len(joints)}, bodies, {width}], which is "
                f"{f'of shape {shape}' if shape else 'missing'}"
            )
    places, turns = held["body_pos_w"].astype(np.float64), held["body_quat_w"].astype(np.float64)
    base = _base(path, held, robot, places)
    start = np.concatenate((places[:, base], turns[:, base]), axis=1)
    candidates = [np.concatenate((start, joints[:, order]), axis=1) for order in _orders(path, held, robot)]
    clips.make(torch.from_numpy(candidates[0]), 1.0, str(path), joints.shape[1])
    misses = [_miss(candidate, places, robot) for candidate in candidates]
    if min(misses) > _SAME_PLACE:
        raise ValueError(
            f"motion {path}: with these joint_pos the bodies of the {robot.name} lie {min(misses) * 100:.0f} cm from "
            "body_pos_w; store joint_names, or convert from a recording of this robot"
        )
    return candidates[int(np.argmin(misses))]


def _base(path: Path, held: dict[str, NDArray], robot: Robot, places: Array) -> int:
    if "body_names" not in held:
        return int(places.shape[1] > 1 and not places[:, 0].any())
    names = [str(name) for name in held["body_names"]]
    if robot.body_names[0] not in names:
        raise ValueError(f"motion {path}: body_names lacks {robot.body_names[0]!r}, the base of the {robot.name}")
    return names.index(robot.body_names[0])


def _orders(path: Path, held: dict[str, NDArray], robot: Robot) -> list[list[int]]:
    """Returns, for each order that the file's joints may have, the column of each of the robot's joints."""
    if "joint_names" not in held:
        breadth_first = _breadth_first(robot)
        return [list(range(len(breadth_first))), [breadth_first.index(name) for name in robot.joint_names]]
    names = [str(name) for name in held["joint_names"]]
    missing = [name for name in robot.joint_names if name not in names]
    if missing or len(names) != len(robot.joint_names):
        raise ValueError(
            f"motion {path}: joint_names has {len(names)} entries"
            f"{f' and lacks {missing[0]!r}' if missing else ''}; the {robot.name} has {len(robot.joint_names)} joints"
        )
    return [[names.index(name) for name in robot.joint_names]]


def _breadth_first(robot: Robot) -> list[str]:
    """Returns the joint names by their depth in the tree of bodies, siblings in the model's order."""
    model = robots.compiled(robot)
    queue, found = [0], []
    while queue:
        body = queue.pop(0)
        found += [model.joint(joint).name for joint in np.flatnonzero(model.jnt_bodyid == body)]
        queue += [int(child) for child in np.flatnonzero(model.body_parentid == body) if child]
    return [name for name in found if name in robot.joint_names]


def _miss(qpos: Array, places: Array, robot: Robot) -> float:
    """Returns the mean distance of bodies from the nearest ones of the other set, over a few frames.

    Counted from the smaller set: a file may lack bodies that the robot has, or have some beside them.
    """
    rows = np.unique(np.linspace(0, len(qpos) - 1, _PROBED_FRAMES).astype(int))
    clip = MotionClip(torch.from_numpy(qpos[np.append(rows, rows[-1])]).float(), 1.0, "probe")
    own = clips.kinematics(clip, robot).body_pos[:-1].double().numpy()
    apart = np.linalg.norm(own[:, :, None] - places[rows][:, None], axis=-1)
    return float(apart.min(axis=1 if own.shape[1] > places.shape[1] else 2).mean())
