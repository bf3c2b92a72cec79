"""Pictures of a robot by MuJoCo's own renderer, or its sketch where there is no OpenGL.

The scene is for drawing alone: a copy of the robot's model with links where the shapes for contact show only feet. The
reference is a second robot, seen through.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
from torch import Tensor

from functional_sac.envs import sketch
from functional_sl.sim.contract import RobotModel, SimState

if TYPE_CHECKING:
    from functional_sl.sim.robots.robot import Robot

WIDTH, HEIGHT = 480, 360  # pixels
AZIMUTH, ELEVATION, DISTANCE = 145.0, -12.0, 3.0  # degrees, degrees, heights of the standing base
DENSITY = 1600.0  # kg/m^3, gives links a thickness by their mass
SHORTEST, SHORT = 0.01, 0.065  # m, links that are drawn, and that are drawn as motors
THICKNESS = (0.014, 0.042)  # m, radius of the thinnest and of the thickest link
SHELL, MOTOR, FOOT = (0.86, 0.87, 0.89, 1.0), (0.24, 0.26, 0.3, 1.0), (0.16, 0.17, 0.2, 1.0)
GHOST = (0.15, 0.5, 1.0, 0.22)
HORIZON = (0.96, 0.97, 0.98, 1.0)

_CHOSEN = "MUJOCO_GL"
_PLATFORMS = {"linux": ("egl", "osmesa"), "darwin": ("cgl",)}
_TRIAL = """
import os
try:
    import mujoco
    context = mujoco.GLContext(8, 8)
    context.make_current()
    drawing = mujoco.MjrContext(mujoco.MjSpec().compile(), mujoco.mjtFontScale.mjFONTSCALE_100)
    drawing.free()
    context.free()
    print(type(context).__module__)
except BaseException as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(1)
"""
_TRIAL_SECONDS = 60.0


class Pictures:
    """Draws the worlds of one robot. What it needs is made at the first picture and kept until `close`.

    Attributes:
      sketched: why pictures are sketches; empty where MuJoCo draws, and before the first picture.
    """

    def __init__(self, robot: Robot, model: RobotModel) -> None:
        """Keeps the robot and what tasks know of it."""
        self._robot, self._model = robot, model
        self._links = sketch.links(robot, model)
        self._renderer: _Renderer | None = None
        self.sketched = ""

    def draw(self, state: SimState, i: int, reference: tuple[Tensor, Tensor] | None = None) -> np.ndarray:
        """Returns a picture that follows the robot of world i, uint8 [H, W, 3].

        Args:
          state: of N worlds.
          i: which one.
          reference: where the robot should be: `qpos` [N, 7 + J] and the origins of its bodies [N, B, 3].
        """
        if self._renderer is None and not self.sketched:
            self._open()
        height = float(self._model.default_qpos[2])
        qpos, bodies = (None, None) if reference is None else (leaf[i].cpu().numpy() for leaf in reference)
        if self._renderer is None:
            return sketch.draw(self._links, sketch.points(self._model, state, i), height, bodies)
        return self._renderer.draw(state.qpos[i].cpu().numpy(), height, qpos)

    def close(self) -> None:
        """Frees the renderer; a later picture makes it anew."""
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = None

    def _open(self) -> None:
        module, self.sketched = backend()
        if not module:
            return
        try:
            self._renderer = _Renderer(scene(self._robot, self._model, self._links), module)
        except Exception as error:  # whatever a graphics library raises
            self.sketched = _said(error)


@functools.cache
def backend() -> tuple[str, str]:
    """Returns the module of the OpenGL that MuJoCo can draw with here, or why there is none; tries once a process.

    It is the one that MUJOCO_GL names; without it, on Linux, EGL or else OSMesa, which both need no screen.

    Returns:
      Such as ("mujoco.egl", ""), or ("", the reason).
    """
    reasons = []
    names = os.environ.get(_CHOSEN, "").lower().split() or _PLATFORMS.get(sys.platform, ("glfw",))
    for name in names:
        # In a process of its own: a driver may crash, a failed context prints when it is deleted and spoils the next.
        try:
            tried = subprocess.run(
                [sys.executable, "-c", _TRIAL], env=os.environ | {_CHOSEN: name}, check=True, capture_output=True,
                text=True, timeout=_TRIAL_SECONDS,
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            reasons.append(f"{name}: {' '.join(error.stdout.split()) or error}")
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{name}: {_said(error)}")
        else:
            return tried.stdout.split()[-1], ""
    return "", f"MuJoCo finds no OpenGL to draw with ({'; '.join(reasons)}); libegl1 or libosmesa6 is one"


def scene(robot: Robot, model: RobotModel, links: list[tuple[int, int]]) -> mujoco.MjModel:
    """Returns a robot's model for drawing; the robot itself stays as it is.

    Args:
      robot: what is drawn; one with meshes by these alone.
      model: its facts.
      links: pairs from `sketch.links`.
    """
    spec = robot.spec.copy()
    if not any(geom.type == mujoco.mjtGeom.mjGEOM_MESH for geom in spec.geoms):
        _paint(spec)
        _add_necks(spec)
        _add_links(spec, robot, model, links)
    _light(spec, robot.body_names[0], robot.default_qpos[2])
    return spec.compile()


def _paint(spec: mujoco.MjSpec) -> None:
    for geom in spec.geoms:
        if geom.type != mujoco.mjtGeom.mjGEOM_PLANE:
            geom.rgba = FOOT if geom.priority else SHELL


def _add_necks(spec: mujoco.MjSpec) -> None:
    """Joins balls that lie apart from the origin of their body, such as heads, to it."""
    for ball in [geom for geom in spec.geoms if geom.type == mujoco.mjtGeom.mjGEOM_SPHERE and not geom.priority]:
        _add_capsule(ball.parent, np.zeros(3), ball.pos, 0.5 * ball.size[0], MOTOR)


def _add_links(spec: mujoco.MjSpec, robot: Robot, model: RobotModel, links: list[tuple[int, int]]) -> None:
    """Adds what a link's mass fills from its origin to the next one or to the tip of the limb, and the joints."""
    places = [spec.body(name).pos for name in robot.body_names] + [
        model.site(tip).pos.numpy(force=True) for tip in sketch.tips(model)
    ]
    number, thickest = Counter(i for i, _ in links), dict.fromkeys(robot.body_names, 0.0)
    for i, j in links:
        body, length = spec.body(robot.body_names[i]), float(np.linalg.norm(places[j]))
        if length < SHORTEST:
            continue
        radius = float(np.clip(np.sqrt(body.mass / number[i] / (np.pi * DENSITY * length)), *THICKNESS))
        _add_capsule(body, np.zeros(3), places[j], radius, SHELL if length > SHORT else MOTOR)
        for end in (i, j):
            if 0 < end < len(robot.body_names):
                thickest[robot.body_names[end]] = max(thickest[robot.body_names[end]], radius)
    for name, radius in thickest.items():
        _add_capsule(spec.body(name), np.zeros(3), np.zeros(3), 1.15 * radius, MOTOR)


def _add_capsule(
    body: mujoco.MjsBody, start: np.ndarray, end: np.ndarray, radius: float, colour: tuple[float, ...]
) -> None:
    """Adds a capsule, or a ball where the ends agree, that neither collides nor weighs."""
    unseen = {"contype": 0, "conaffinity": 0, "mass": 0.0, "rgba": colour, "size": (radius, 0, 0)}
    if np.linalg.norm(end - start) > 0.01:
        body.add_geom(type=mujoco.mjtGeom.mjGEOM_CAPSULE, fromto=(*start, *end), **unseen)
    elif radius:
        body.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, pos=start, **unseen)


def _light(spec: mujoco.MjSpec, base: str, height: float) -> None:
    """Sets light, floor and sky, and what the software renderers of a CPU need long for."""
    for light in spec.lights:
        spec.delete(light)
    spec.body(base).add_light(
        mode=mujoco.mjtCamLight.mjCAMLIGHT_TRACK, type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
        pos=(1.0, -1.0, 3.0), dir=(-0.35, 0.35, -1.0), diffuse=(0.55, 0.55, 0.55), specular=(0.15, 0.15, 0.15),
    )  # fmt: skip
    look, head = spec.visual, spec.visual.headlight
    head.ambient, head.diffuse, head.specular = (0.4,) * 3, (0.35,) * 3, (0.1,) * 3
    spec.stat.extent, spec.stat.center = 2.0 * height, (0.0, 0.0, height)
    look.quality.shadowsize, look.quality.numslices, look.quality.numstacks = 1024, 16, 8
    look.map.shadowclip, look.map.fogstart, look.map.fogend = 2.0, 2.0, 12.0
    look.rgba.fog, look.rgba.haze = HORIZON, HORIZON
    spec.add_texture(
        name="sky", type=mujoco.mjtTexture.mjTEXTURE_SKYBOX, builtin=mujoco.mjtBuiltin.mjBUILTIN_FLAT,
        rgb1=HORIZON[:3], rgb2=HORIZON[:3], width=64, height=64,
    )  # fmt: skip
    floor = spec.texture("checker")
    if floor is not None:
        floor.rgb1, floor.rgb2 = (0.86, 0.88, 0.9), (0.76, 0.79, 0.82)


class _Renderer:
    """MuJoCo's drawing of one scene into memory."""

    def __init__(self, model: mujoco.MjModel, module: str) -> None:
        self._model, self._data, self._ghost = model, mujoco.MjData(model), mujoco.MjData(model)
        self._scene, self._option = mujoco.MjvScene(model, maxgeom=2 * model.ngeom + 100), mujoco.MjvOption()
        self._option.sitegroup[:] = 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_FOG] = True
        self._rect = mujoco.MjrRect(0, 0, WIDTH, HEIGHT)
        with contextlib.ExitStack() as undo:
            self._gl: Any = importlib.import_module(module).GLContext(WIDTH, HEIGHT)
            undo.callback(self._gl.free)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
            undo.pop_all()

    def draw(self, qpos: np.ndarray, height: float, ghost: np.ndarray | None) -> np.ndarray:
        """Returns the robot at `qpos` and its reference at `ghost`, seen from a place that goes with the robot."""
        everything = mujoco.mjtCatBit.mjCAT_ALL
        camera = mujoco.MjvCamera()
        camera.azimuth, camera.elevation, camera.distance = AZIMUTH, ELEVATION, DISTANCE * height
        camera.lookat = (*qpos[:2], 0.85 * height)
        self._place(self._data, qpos)
        mujoco.mjv_updateScene(self._model, self._data, self._option, None, camera, everything, self._scene)
        if ghost is not None:
            self._add_ghost(ghost)
        self._gl.make_current()
        mujoco.mjr_render(self._rect, self._scene, self._context)
        image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, self._rect, self._context)
        return image[::-1].copy()

    def close(self) -> None:
        """Frees what lies on the side of OpenGL."""
        self._gl.make_current()
        self._context.free()
        self._gl.free()

    def _place(self, data: mujoco.MjData, qpos: np.ndarray) -> None:
        data.qpos[:] = qpos
        for part in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_camlight):
            part(self._model, data)

    def _add_ghost(self, qpos: np.ndarray) -> None:
        begin, moving = self._scene.ngeom, mujoco.mjtCatBit.mjCAT_DYNAMIC
        self._place(self._ghost, qpos)
        mujoco.mjv_addGeoms(self._model, self._ghost, self._option, mujoco.MjvPerturb(), moving, self._scene)
        for geom in self._scene.geoms[begin : self._scene.ngeom]:
            # What is seen through gets darker with every layer, and the motors lie in the shells.
            geom.rgba = GHOST if geom.rgba[0] > MOTOR[0] + 0.1 else (*GHOST[:3], 0.4 * GHOST[3])


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
