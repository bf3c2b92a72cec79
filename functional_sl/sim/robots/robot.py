"""Building a robot with a floating base out of tables of facts, through `mujoco.MjSpec`.

A robot is its links (frames, inertias, joints), its motors, its shapes for contact and the frames of its sensors. A
user's own model can take the place of links and shapes; motors, options, contact measurement and floor stay the same,
so that a task means the same on both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import mujoco
import torch
from torch import Tensor

from functional_sl.sim.contract import RobotModel, Site

Vector = tuple[float, ...]
UNIT = (1.0, 0.0, 0.0, 0.0)
AXES = {"x": (1, 0, 0), "y": (0, 1, 0), "z": (0, 0, 1)}
FLOOR = "floor"
_TOUCH = "touch_"
# The touch sensor sums over a zone of the body; this radius encloses any link.
_TOUCH_RADIUS = 1.0


class Joint(NamedTuple):
    """A hinge through the origin of its link."""

    name: str
    axis: str  # x, y or z of the link's frame
    range: Vector  # lower and upper limit


class Link(NamedTuple):
    """A rigid body, its place on its parent and the hinge between them (None for the floating base)."""

    body: str
    parent: str
    pos: Vector
    quat: Vector
    joint: Joint | None
    mass: float
    com: Vector  # centre of mass
    inertia_quat: Vector  # orientation of the principal axes
    inertia: Vector  # principal moments


class Shape(NamedTuple):
    """A primitive for contact: a sphere (no `end`), a capsule from `start` to `end`, or a box of three half sizes."""

    body: str
    size: Vector  # (radius,) or half sizes
    start: Vector
    end: Vector | None = None
    foot: bool = False


class Motor(NamedTuple):
    """A position actuator and the joint's own losses."""

    kp: float
    kd: float
    effort_limit: float
    armature: float
    friction_loss: float


class Contact(NamedTuple):
    """How shapes meet each other and the floor."""

    self_collision: bool
    foot_friction: float
    excluded: tuple[tuple[str, str], ...] = ()


class Options(NamedTuple):
    """The physics of a scene."""

    sim_dt: float
    decimation: int
    iterations: int = 10
    line_search_iterations: int = 20
    elliptic: bool = False
    impedance_ratio: float = 1.0


class Frame(NamedTuple):
    """A site by the name of its body, with the body's orientation."""

    body: str
    pos: Vector


class Robot(NamedTuple):
    """A robot on a floor, ready to be compiled.

    Attributes:
      name: the robot.
      spec: the scene, which the caller may extend by what does not move (lights, cameras) before a simulator is made.
      joint_names: actuated hinges in the order of `qpos[7:]`.
      body_names: bodies of the table, the floating base first.
      contact_bodies: bodies with shapes.
      frames: sites by name.
      motors: one a joint.
      default_qpos: the standing pose.
      options: time step and solver.
    """

    name: str
    spec: mujoco.MjSpec
    joint_names: tuple[str, ...]
    body_names: tuple[str, ...]
    contact_bodies: tuple[str, ...]
    frames: Mapping[str, Frame]
    motors: tuple[Motor, ...]
    default_qpos: Vector
    options: Options


def table(text: str) -> tuple[Link, ...]:
    """Reads links from text, three lines each; bars separate the groups of the second and third.

    The lines hold: body, parent, joint, axis, lower and upper limit (`free` for the floating base); position and
    orientation on the parent, mass; centre of mass, orientation of the principal axes, principal moments.
    """
    lines = text.strip().splitlines()
    return tuple(_link(*lines[i : i + 3]) for i in range(0, len(lines), 3))


def _link(names: str, place: str, inertia: str) -> Link:
    body, parent, joint, *rest = names.split()
    pos, quat, (mass,) = (_numbers(group.split()) for group in place.split("|"))
    com, inertia_quat, moments = (_numbers(group.split()) for group in inertia.split("|"))
    hinge = Joint(joint, rest[0], _numbers(rest[1:])) if rest else None
    return Link(body, parent, pos, quat, hinge, mass, com, inertia_quat, moments)


def _numbers(words: list[str]) -> Vector:
    return tuple(float(word) for word in words)


def build(
    name: str,
    links: tuple[Link, ...],
    shapes: tuple[Shape, ...],
    motors: Mapping[str, Motor],
    frames: Mapping[str, Frame],
    default_qpos: Vector,
    options: Options,
    contact: Contact,
    xml_path: str | Path | None = None,
) -> Robot:
    """Builds a robot from its tables.

    Args:
      name: the robot.
      links: parents before children, joints in the order of the actions.
      shapes: what collides.
      motors: by joint name.
      frames: sites by name.
      default_qpos: base position and quaternion, then the joint angles of the standing pose.
      options: time step and solver.
      contact: how shapes collide.
      xml_path: a model of the same robot that replaces links and shapes.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if that model cannot be read, or lacks one of the bodies, or has other joints or another order.
    """
    joints = tuple(link.joint.name for link in links if link.joint)
    bodies = tuple(link.body for link in links)
    if xml_path is None:
        spec = _from_tables(name, links, shapes, contact)
    else:
        spec = _from_file(name, Path(xml_path), joints, bodies)
    _add_floor(spec, contact.foot_friction)
    _set_options(spec, options)
    found = tuple(motors[joint] for joint in joints)
    _add_motors(spec, joints, found)
    touched = tuple(body for body in bodies if any(g.contype or g.conaffinity for g in spec.body(body).geoms))
    _add_touch(spec, touched)
    return Robot(name, spec, joints, bodies, touched, frames, found, default_qpos, options)


def facts(robot: Robot, device: torch.device | str = "cpu") -> RobotModel:
    """Returns what tasks need to know of a robot, as tensors on a device."""
    model = compiled(robot)

    def tensor(values: Vector) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    joints = [model.joint(name) for name in robot.joint_names]
    return RobotModel(
        name=robot.name,
        joint_names=robot.joint_names,
        body_names=robot.body_names,
        contact_bodies=robot.contact_bodies,
        sites={
            name: Site(robot.body_names.index(frame.body), tensor(frame.pos), tensor(UNIT))
            for name, frame in robot.frames.items()
        },
        joint_range=tensor([tuple(joint.range) for joint in joints]),
        default_qpos=tensor(robot.default_qpos),
        kp=tensor([motor.kp for motor in robot.motors]),
        kd=tensor([motor.kd for motor in robot.motors]),
        effort_limit=tensor([motor.effort_limit for motor in robot.motors]),
        mass=float(model.body_subtreemass[0]),
        sim_dt=robot.options.sim_dt,
        decimation=robot.options.decimation,
    )


def compiled(robot: Robot) -> mujoco.MjModel:
    """Returns the robot's MuJoCo model; its sensors are the touch sensors of `contact_bodies`, in this order.

    Raises:
      ValueError: with MuJoCo's reason.
    """
    try:
        return robot.spec.compile()
    except ValueError as error:
        raise ValueError(f"the model of {robot.name} does not compile: {error}") from error


def _from_tables(name: str, links: tuple[Link, ...], shapes: tuple[Shape, ...], contact: Contact) -> mujoco.MjSpec:
    spec = mujoco.MjSpec()
    spec.modelname = name
    spec.compiler.degree = False
    bodies = {"world": spec.worldbody}
    for link in links:
        body = bodies[link.parent].add_body(
            name=link.body, pos=link.pos, quat=link.quat, mass=link.mass, ipos=link.com,
            iquat=link.inertia_quat, inertia=link.inertia, explicitinertial=True,
        )  # fmt: skip
        bodies[link.body] = body
        if link.joint is None:
            body.add_freejoint(name="floating_base_joint")
        else:
            body.add_joint(name=link.joint.name, axis=AXES[link.joint.axis], range=link.joint.range)
    for shape in shapes:
        _add_shape(bodies[shape.body], shape, contact)
    for first, second in contact.excluded:
        spec.add_exclude(bodyname1=first, bodyname2=second)
    return spec


def _add_shape(body: mujoco.MjsBody, shape: Shape, contact: Contact) -> None:
    if len(shape.size) == 3:
        geom = body.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, size=shape.size, pos=shape.start)
    elif shape.end is None:
        geom = body.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=(*shape.size, 0, 0), pos=shape.start)
    else:
        ends = (*shape.start, *shape.end)
        geom = body.add_geom(type=mujoco.mjtGeom.mjGEOM_CAPSULE, size=(*shape.size, 0, 0), fromto=ends)
    geom.contype = int(contact.self_collision)
    geom.conaffinity = 1
    geom.rgba = (0.25, 0.27, 0.3, 1) if shape.foot else (0.7, 0.72, 0.75, 1)
    if shape.foot:
        # A pair of equal priority takes the larger friction, which would be the floor's.
        geom.priority = 1
        geom.friction = (contact.foot_friction, 0.005, 0.0001)


def _from_file(name: str, path: Path, joints: tuple[str, ...], bodies: tuple[str, ...]) -> mujoco.MjSpec:
    if not path.is_file():
        raise FileNotFoundError(f"robot model {path} does not exist; give the path of an MJCF or URDF file of {name}")
    try:
        spec = mujoco.MjSpec.from_file(str(path))
        spec.compile()
    except ValueError as error:
        raise ValueError(f"robot model {path} cannot be read: {error}") from error
    _check_joints(name, path, spec, joints)
    missing = [body for body in bodies if spec.body(body) is None]
    if missing:
        raise ValueError(
            f"robot model {path} has no body {missing[0]!r}; the tasks of {name} read {', '.join(missing)}"
        )
    zones = [site for site in spec.sites if site.name.startswith(_TOUCH)]
    for element in (*spec.actuators, *spec.sensors, *spec.keys, *zones):
        spec.delete(element)
    return spec


def _check_joints(name: str, path: Path, spec: mujoco.MjSpec, joints: tuple[str, ...]) -> None:
    model = spec.compile()
    kinds = [int(kind) for kind in model.jnt_type]
    if not kinds or kinds[0] != mujoco.mjtJoint.mjJNT_FREE or any(k != mujoco.mjtJoint.mjJNT_HINGE for k in kinds[1:]):
        raise ValueError(f"robot model {path}: the first joint of {name} must be free and all others hinges")
    found = tuple(model.joint(i).name for i in range(1, model.njnt))
    if found == joints:
        return
    i = next((i for i, (a, b) in enumerate(zip(found, joints, strict=False)) if a != b), min(len(found), len(joints)))
    have = f"{found[i]!r}" if i < len(found) else "nothing"
    want = f"{joints[i]!r}" if i < len(joints) else "nothing"
    raise ValueError(f"robot model {path}: hinge {i + 1} is {have}, {name} has {want} there ({len(joints)} hinges)")


def _add_floor(spec: mujoco.MjSpec, friction: float) -> None:
    if any(geom.type == mujoco.mjtGeom.mjGEOM_PLANE for geom in spec.worldbody.geoms):
        return
    spec.add_texture(
        name="checker", type=mujoco.mjtTexture.mjTEXTURE_2D, builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=(0.62, 0.62, 0.63), rgb2=(0.5, 0.5, 0.51), width=256, height=256,
    )  # fmt: skip
    material = spec.add_material(name="checker", texuniform=True, texrepeat=(1, 1))
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "checker"
    spec.worldbody.add_geom(
        name=FLOOR, type=mujoco.mjtGeom.mjGEOM_PLANE, size=(0, 0, 0.05), material="checker",
        friction=(friction, 0.005, 0.0001),
    )  # fmt: skip
    spec.worldbody.add_light(pos=(1, 0, 3.5), dir=(0, 0, -1), type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL)


def _set_options(spec: mujoco.MjSpec, options: Options) -> None:
    spec.option.timestep = options.sim_dt
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.solver = mujoco.mjtSolver.mjSOL_NEWTON
    spec.option.iterations = options.iterations
    spec.option.ls_iterations = options.line_search_iterations
    spec.option.impratio = options.impedance_ratio
    cone = mujoco.mjtCone
    spec.option.cone = cone.mjCONE_ELLIPTIC if options.elliptic else cone.mjCONE_PYRAMIDAL


def _add_motors(spec: mujoco.MjSpec, joints: tuple[str, ...], motors: tuple[Motor, ...]) -> None:
    for name, motor in zip(joints, motors, strict=True):
        joint = spec.joint(name)
        joint.armature, joint.frictionloss = motor.armature, motor.friction_loss
        joint.damping = (0.0, 0.0, 0.0)
        actuator = spec.add_actuator(name=name, target=name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        actuator.set_to_position(kp=motor.kp, kv=motor.kd)
        actuator.forcerange = (-motor.effort_limit, motor.effort_limit)
        actuator.forcelimited = mujoco.mjtLimited.mjLIMITED_TRUE


def _add_touch(spec: mujoco.MjSpec, bodies: tuple[str, ...]) -> None:
    for body in bodies:
        spec.body(body).add_site(name=_TOUCH + body, size=(_TOUCH_RADIUS,) * 3, group=5)
        spec.add_sensor(
            name=_TOUCH + body, type=mujoco.mjtSensor.mjSENS_TOUCH, objtype=mujoco.mjtObj.mjOBJ_SITE,
            objname=_TOUCH + body,
        )  # fmt: skip
