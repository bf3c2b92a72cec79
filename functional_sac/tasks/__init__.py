"""Robot tasks as pure functions over `SimState`, and `TASKS`, which finds one by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from functional_sac.tasks.settings import Settings

if TYPE_CHECKING:
    from functional_sac.tasks.task import RobotTask
    from functional_sl.sim.contract import RobotModel
    from functional_sl.sim.robots.robot import Robot


COMMON = ("robot_xml", "geometry", "contacts", "constraints", "threads")


class Entry(NamedTuple):
    """How a task is made, and the names of the settings that it has."""

    robot: Callable[[Settings], Robot]
    task: Callable[[RobotModel, Robot, Settings], RobotTask]
    settings: tuple[str, ...] = COMMON


def _g1(settings: Settings) -> Robot:
    from functional_sl.sim.robots import g1

    return g1.robot(settings.geometry, xml_path=settings.robot_xml)


def _g1_of_preset(settings: Settings) -> Robot:
    from functional_sac.tasks import tracking
    from functional_sl.sim.robots import g1

    return g1.robot(settings.geometry, tracking.PRESETS[settings.preset].dynamics, settings.robot_xml)


def _go2(settings: Settings) -> Robot:
    from functional_sl.sim.robots import go2

    return go2.robot(settings.geometry, settings.robot_xml)


def _tracking(model: RobotModel, robot: Robot, settings: Settings) -> RobotTask:
    from functional_sac.tasks import tracking
    from functional_sl.motions import catalog, generate, library

    fps = 1.0 / model.control_dt
    clips = catalog.read(",".join(generate.NAMES) if settings.motion is None else settings.motion, robot, fps)
    motions = library.build(clips, robot, fps, model.default_qpos.device)
    return tracking.make(model, motions, settings.preset, settings.sampling, fps)


def _walk(model: RobotModel, robot: Robot, settings: Settings) -> RobotTask:
    from functional_sac.tasks import walk

    return walk.make(model)


def _joystick(model: RobotModel, robot: Robot, settings: Settings) -> RobotTask:
    from functional_sac.tasks import joystick

    return joystick.make(model)


def describe(task: str, settings: Settings) -> dict[str, Any]:
    """Returns what an exported policy's user must know: `task.describe`, and names and gains of the joints.

    Raises:
      ValueError, OSError, ModuleNotFoundError: if the task cannot be made, as in `envs.robot.make`.
    """
    from functional_sac.tasks import task as robot_tasks
    from functional_sl.sim.robots import robot as robots

    robot = TASKS[task].robot(settings)
    model = robots.facts(robot)
    facts = {"joints": list(model.joint_names), "stiffness": model.kp.tolist(), "damping": model.kd.tolist()}
    return facts | robot_tasks.describe(TASKS[task].task(model, robot, settings))


TASKS = {
    "g1_motion_tracking": Entry(_g1_of_preset, _tracking, ("preset", "motion", "sampling", *COMMON)),
    "g1_walk_flat": Entry(_g1, _walk),
    "go2_joystick_flat": Entry(_go2, _joystick),
}
