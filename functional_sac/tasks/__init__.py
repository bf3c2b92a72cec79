"""Robot tasks as pure functions over `SimState`, and `TASKS`, which finds one by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from functional_sac.tasks.settings import Settings

if TYPE_CHECKING:
    from functional_sac.tasks.task import RobotTask
    from functional_sl.sim.contract import RobotModel
    from functional_sl.sim.robots.robot import Robot


class Entry(NamedTuple):
    """How a task is made."""

    robot: Callable[[Settings], Robot]
    task: Callable[[RobotModel, Robot, Settings], RobotTask]


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


TASKS = {
    "g1_motion_tracking": Entry(_g1_of_preset, _tracking),
    "g1_walk_flat": Entry(_g1, _walk),
    "go2_joystick_flat": Entry(_go2, _joystick),
}
